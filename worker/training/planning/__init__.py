"""What a job needs, predicted before anything is loaded: memory (from tensors without data) and time."""
