"""What SkyPilot's and Kubeflow's own code says of what Longhaul hands to them (`make test-engines`)."""
