"""A Slurm of one machine: programs that run scripts as processes, and may be told to preempt, to fail and to wait."""
