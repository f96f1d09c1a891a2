"""The service's own memory, over months: no request waits for the garbage collector, and memory does not grow."""

from __future__ import annotations

import ctypes
import gc

M_ARENA_MAX = -8
"""From glibc's malloc.h."""
ARENAS = 2


def tune_memory() -> None:
    """Call once, after all imports and before the first thread.

    What was imported stays: the garbage collector need not scan it again and again while requests wait. And
    glibc would give each of forty threads a heap of its own, in which freed memory stays; a few are enough.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # else not glibc: its malloc has other habits
        mallopt(M_ARENA_MAX, ARENAS)
    gc.collect()
    gc.freeze()
