"""What SkyPilot's own code says of what Longhaul hands to it (`make test-engines`)."""
