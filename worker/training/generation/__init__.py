"""Using a finished model: `python -m worker.training generate`."""
