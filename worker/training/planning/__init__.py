"""What a job needs, seen before anything is loaded: the memory of a step, on tensors without data; and the time."""
