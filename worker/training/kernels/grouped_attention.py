"""Attention whose heads share keys and values (grouped queries), on GPUs without flash attention.

Those before compute capability 8.0 have torch's memory-efficient kernel alone, which wants a key for each query's head.
Asked to share them (`enable_gqa`), torch takes its plain kernel there, which holds a score for each pair of positions.
"""

from __future__ import annotations

from transformers.integrations import sdpa_attention


def repeat_shared_heads() -> None:
    """Have transformers repeat keys and values before attention, in this process, instead of sharing them.

    Layers that are recomputed look the function up anew, so it is replaced once, and for all of them.
    """
    sdpa_attention.use_gqa_in_sdpa = _never  # type: ignore[assignment]


def _never(*tensors: object) -> bool:
    return False
