"""What users do to jobs."""
