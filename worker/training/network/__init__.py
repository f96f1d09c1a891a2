"""The network that is trained: loaded once and guarded; T5's modules exchanged for faster ones, and compiled.

Read model and guards, then t5, which exchanges the modules of the others.
"""
