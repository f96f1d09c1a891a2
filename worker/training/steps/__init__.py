"""What a step is made of: its rows, as many at once as memory allows, its random numbers and its learning rate.

Read order, limits and batches, in which rows of a prepared dataset become tensors; randomness and schedule stand alone.
"""
