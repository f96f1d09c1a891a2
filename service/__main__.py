"""`python -m service`: the HTTP service, on uvicorn."""

from __future__ import annotations

import ctypes
import gc
import os

from jobs.process.lifeline import PARENT_PID, tie_to_parent

if PARENT_PID in os.environ:  # first of all: nobody outlives its parent (architecture.md: Processes)
    tie_to_parent(int(os.environ[PARENT_PID]))

import logging
import sys

import uvicorn

from jobs.disk.files import unwritable
from jobs.process import logs, secrets
from service.edge.connections import LIMITS, raise_file_limit
from service.main import create_app
from service.settings import read_settings


def main() -> int:
    """Read the environment, listen, serve until told to stop."""
    secrets.register(os.environ)
    try:
        settings = read_settings(os.environ)
        app = create_app(settings)
    except ValueError as error:
        print(f"longhaul service: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log)
    log = logging.getLogger("longhaul.service")
    log.info("%r", settings)
    if (why := unwritable((settings.runs, settings.uploads))) is not None:
        log.error("no job could be taken: %s", why)
        return 2
    raise_file_limit()
    tune_memory()
    uvicorn.run(app, host=settings.host, port=settings.port, **LIMITS)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
