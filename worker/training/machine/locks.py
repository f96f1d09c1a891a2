"""Locks of the kernel (`flock`): held by an open file, and free as soon as its process has ended. Needs no torch."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO


def gpu_lock(folder: Path, gpu: str) -> Path:
    """The file that keeps a GPU (its UUID, without the prefix `GPU-`) to one process."""
    return folder / f"gpu-{gpu}.lock"


def try_lock(file: Path, *, shared: bool = False) -> BinaryIO | None:
    """Take a lock, alone or shared; it is held until the returned file is closed. None: another process has it, and not
    as one to share.
    """
    # For reading, too: NFS shares a lock of such files alone.
    handle = open(file, "a+b")  # noqa: SIM115 - the open file is the lock; Python opens it close-on-exec
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle
