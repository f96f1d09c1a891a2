"""Takes jobs from Redis, supervises attempts, tells the sinks."""
