"""How much memory a step takes: seen before anything is loaded, on tensors without data."""
