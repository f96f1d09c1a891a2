"""Using finished models."""
