"""What a job is: specification, states, events, run directory, and their projection in Redis."""
