"""A cloud of one machine, for SkyPilot and Kubeflow: `sky` and `kubectl` are programs that run tasks as processes."""
