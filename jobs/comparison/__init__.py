"""What differs between jobs, what it costs, and why one fits where another does not."""
