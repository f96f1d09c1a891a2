"""What is kept about an out-of-memory error, for later diagnosis: a folder in the run directory.

    oom_reports/step-00000123-1/  report.json; on CUDA memory_summary.txt, snapshot.pickle (pytorch.org/memory_viz)

The allocator's history is not in the snapshot: recording it would cost every step something.
"""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from worker.training.machine.out_of_memory import MemoryShortage

FOLDER = "oom_reports"
DRIVER = Path("/proc/driver/nvidia/version")
MOST_FOLDERS = 10
"""Of one run. What comes later has its event only."""

log = logging.getLogger("longhaul.trainer")


class OomReports:
    """The folder `oom_reports/` of one run directory."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    def wanted(self) -> bool:
        """Whether another error would be kept."""
        try:
            return not self._folder.exists() or sum(1 for _ in self._folder.iterdir()) < MOST_FOLDERS
        except OSError:
            return False

    def keep(self, step: int, shortage: MemoryShortage, about: Mapping[str, Any]) -> str | None:
        """Write one folder; its name, relative to the run directory. None if there are enough, or it cannot be written.

        `about`: whatever else belongs into report.json.
        """
        if not self.wanted():
            return None
        number = 1
        while (folder := self._folder / f"step-{step:08d}-{number}").exists():
            number += 1
        try:
            self._folder.mkdir(exist_ok=True)
            folder.mkdir()
            _write(folder, step, shortage, about)
        except Exception as error:  # a full disk, no memory for this either: no reason to end a run that can continue
            log.warning("no report is kept about the memory that ran out in step %d: %r", step, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return f"{FOLDER}/{folder.name}"


def _write(folder: Path, step: int, shortage: MemoryShortage, about: Mapping[str, Any]) -> None:
    other_processes = shortage.other_processes
    report = {
        "step": step,
        "message": shortage.message,
        "cause": shortage.cause,
        "requested_bytes": shortage.requested,
        "allocated_bytes": shortage.figures.allocated,
        "reserved_bytes": shortage.figures.reserved,
        "free_bytes": shortage.figures.free,
        "other_processes_bytes": None if other_processes is None else other_processes.bytes,
        "processes": [] if other_processes is None else [each.model_dump() for each in other_processes.processes],
        **about,
        "versions": _versions(shortage.device),
        "traceback": "".join(shortage.trace).splitlines(),
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if shortage.summary is not None:
        (folder / "memory_summary.txt").write_text(shortage.summary)
    if shortage.snapshot is not None:
        with open(folder / "snapshot.pickle", "wb") as file:
            pickle.dump(shortage.snapshot, file)


def _versions(device: str) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device == "cuda":
        versions["gpu"] = torch.cuda.get_device_name()
        versions["driver"] = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else None
    return versions
