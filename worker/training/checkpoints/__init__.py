"""Checkpoints: complete and verified, or absent.

Read checkpoint (what one is) and saving (how it is written), then predecessor and adoption (another job's, taken over).
"""
