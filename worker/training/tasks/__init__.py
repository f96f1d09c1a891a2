"""What a model learns, a folder a task: `task.py` says what the trainer asks of one, `registry.py` finds it by name."""
