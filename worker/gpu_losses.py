"""How often in a row workers have ended because they lost a GPU: from the third time on the next one waits first.

Remembered beside the runs, by GPU, in `.locks/gpu-<uuid>.lost`: the worker that comes next is another container.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from jobs.disk.files import write_atomically

log = logging.getLogger("longhaul.worker")
STEADY_S = 600.0
"""A worker that had the GPU for so long begins a new count."""
WAITS_S = (0.0, 0.0, 60.0, 120.0, 300.0, 600.0)
"""From the end of the last worker until the next takes a job, by the number of ends in a row; the last for all more."""


class GpuLosses:
    """What one train worker knows of the workers before it, and passes on to the next."""

    def __init__(self, runs: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = runs / ".locks"
        self._clock = clock
        self._started = clock()

    def add(self, uuid: str) -> None:
        """This worker ends because it lost the GPU. A loss that another slot has counted meanwhile is the same one."""
        now = self._clock()
        ends, at = self._read(uuid)
        if at > self._started:
            return
        ends = 1 if now - self._started > STEADY_S else ends + 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file(uuid), json.dumps({"ends": ends, "at": now}).encode())
        except OSError as error:
            log.error("the loss of the GPU is not counted: %s", error)

    def pause(self, uuid: str) -> str | None:
        """Why no job is taken yet though the GPU is there; None: one may be. The time since then does not count."""
        ends, at = self._read(uuid)
        until = at + WAITS_S[min(ends, len(WAITS_S)) - 1]
        self._started = now = self._clock()
        if not at <= now < until:
            return None
        clock = time.strftime("%H:%M:%S", time.gmtime(until))
        return f"the GPU was lost {ends} times in a row; it is there again, and no job is taken until {clock} UTC"

    def _read(self, uuid: str) -> tuple[int, float]:
        try:
            saved = json.loads(self._file(uuid).read_bytes())
            return int(saved["ends"]), float(saved["at"])
        except FileNotFoundError:
            return 0, 0.0
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.error("how often the GPU was lost cannot be read, and counting starts again: %s", error)
            return 0, 0.0

    def _file(self, uuid: str) -> Path:
        return self._folder / f"gpu-{uuid}.lost"
