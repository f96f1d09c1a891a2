"""A program for test_float16.py: an attempt whose gradients overflow at some steps, killed behind the last one named.

`python -m tests.training.killed_overflows RUN STEP…`. What is being saved then is saved first.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from jobs.disk.rundir import RunDir
from jobs.events import AnyFact, UpdateSkipped
from tests.training.adapters.test_float16 import plant
from tests.training.attempts import attempt
from worker.training.journal import Journal


def main(run: RunDir, steps: list[int]) -> None:
    """Killed once the last skipped update is noted."""
    real = Journal.note

    def note(journal: Journal, fact: AnyFact) -> None:
        real(journal, fact)
        if isinstance(fact, UpdateSkipped) and fact.step == steps[-1]:
            for thread in threading.enumerate():
                if thread.name.startswith("save-"):
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, *steps)
        patch.setattr(Journal, "note", note)
        attempt(run)


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])), [int(step) for step in sys.argv[2:]])
