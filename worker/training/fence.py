"""Fencing: a trainer whose attempt is over writes nothing more (ADR 18).

A box that was cut off from the runs directory, or stood still, loses its lock there without being told, and another
attempt begins. So a trainer looks into the events before everything that it writes to last: they name the open attempt.
"""

from __future__ import annotations

import logging
import os

from jobs.disk.rundir import RunDir
from jobs.errors import Damaged, NewerFormat, NotFound

log = logging.getLogger("longhaul.trainer")
EXIT_CODE = 85
"""Of a trainer that was fenced off. Nothing follows from it: the attempt is over already."""


def end_if_over(run: RunDir, attempt: int) -> None:
    """End this process at once, whatever its threads are at, where `attempt` has ended or a later one has begun.

    Costs opening the events and one `fstat`; no line is read twice. They are opened for writing: reading alone a client
    of NFS may answer by itself, from a delegation.
    """
    try:
        record = run.record(from_server=True)
    except NewerFormat as error:  # of a box that this one does not understand: it may have taken the job over
        why = f"its events cannot be read any more: {error}"
    except Damaged:  # no attempt can begin until it is repaired; then its events name the open one
        return
    except NotFound:
        why = "its run directory was deleted"
    else:
        ended = record.attempt == attempt and not record.attempt_open and record.last_reason is not None
        if record.attempt <= attempt and not ended:
            return
        why = f"attempt {record.attempt} has begun" if record.attempt > attempt else "it was given up"
    log.error("job %s: attempt %d is over (%s): process %d ends and writes nothing", run.id, attempt, why, os.getpid())
    os._exit(EXIT_CODE)


def unfenced() -> None:
    """For what has no attempt that another could follow."""
