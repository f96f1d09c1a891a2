"""The longhaul command and library."""
