"""What every process needs: a parent it does not outlive, a log without secrets, keys."""
