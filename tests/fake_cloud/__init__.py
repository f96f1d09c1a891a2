"""A cloud of one machine, for SkyPilot: `sky` is a program that runs tasks as processes."""
