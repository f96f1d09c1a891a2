"""Checkpoints: complete and verified, or absent.

Read checkpoint (what one is), saving (how it is written) and pruning (when it goes), then source_job and adoption
(another job's, taken over).
"""
