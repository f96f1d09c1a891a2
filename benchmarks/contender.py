"""A process that competes with others: it works when its turn has come, and answers with a line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jobs.process.lifeline import tied_to_parent

ROOT = Path(__file__).resolve().parent.parent
Figures = dict[str, Any]
Turn = Callable[[], Figures]


@contextmanager
def contender(name: str, command: Sequence[str], scratch: Path) -> Iterator[Turn]:
    """Runs `command`; every call of the result gives it a turn and returns what it says at its end."""
    # As training sets them: threads that spin for long would take the cores from whoever's turn it is.
    threads = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | threads | {"HF_HUB_OFFLINE": "1"}
    log = scratch / f"{name}.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            tied_to_parent(*command),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        to_it, from_it = process.stdin, process.stdout
        assert to_it is not None and from_it is not None
        begun = False

        def turn() -> Figures:
            nonlocal begun
            if begun:
                to_it.write("\n")
                to_it.flush()
            begun = True
            line = from_it.readline()
            if not line:
                raise RuntimeError(f"{name} has ended with {process.wait()}:\n{log.read_text()[-3000:]}")
            figures: Figures = json.loads(line)
            return figures

        try:
            yield turn
        finally:
            process.kill()
