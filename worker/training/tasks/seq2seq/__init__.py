"""Text to text with an encoder and a decoder, for the models of T5.

Files: layout, builtin. Rows: batches, limits. Network: fused with attention, stack and loss, then compiled. And flops.
"""
