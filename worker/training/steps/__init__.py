"""What a step is made of: the order of its rows, its random numbers and its learning rate; and what it was (result)."""
