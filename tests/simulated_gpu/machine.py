"""A whole `longhaul local` with torch's CUDA build, on simulated GPUs of its own that can be lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.disk.rundir import RunDir
from tests.simulated_gpu.trainers import WITHIN_S
from tests.support.local import ROOT, Local, until

FIRST, SECOND = (f"GPU-51a00000-0000-4000-8000-{number:012}" for number in range(2))
JOB: dict[str, Any] = {
    "model": "builtin:t5-tiny",
    "data": {"train": "recipes.jsonl", "validation": 0.1},
    "evaluation": {"every_steps": 1000, "samples": 0, "generate_rows": 0},  # it computes nothing: no text would end
    "speed": {"compile": False},
}


class Machine(Local):
    """`with Machine(folder, SIMGPU_CARDS="2") as machine:`. The example's rows are among its data."""

    def __init__(self, folder: Path, **environment: str) -> None:
        (folder / "data").mkdir(exist_ok=True)
        shutil.copy(ROOT / "examples/recipes.jsonl", folder / "data")
        ours = {name: value for name, value in os.environ.items() if not name.startswith("LONGHAUL_")}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        ours |= {"SIMGPU_STATE": str(folder / "gpus"), "LONGHAUL_DEVICE": "cuda", "PYTHONPATH": path}
        super().__init__(folder, environment=ours | environment)

    def __enter__(self) -> Machine:
        super().__enter__()
        return self

    def submit(self, **parts: Any) -> RunDir:
        """A job, `JOB` but for these parts."""
        return RunDir(self.folder / "runs" / self.api.submit(JOB | parts)["id"])

    def gpus(self, verb: str, *numbers: int) -> str:
        """`lose`, `restore` or `show` them."""
        said = ""
        for words in [[str(number)] for number in numbers] or [[]]:
            command = [sys.executable, "-m", "simgpu", verb, *words]
            said += subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout
        return said

    def wait_for_workers(self, count: int) -> None:
        """Until so many have a GPU."""
        self.until(lambda: sum(bool(each.get("gpu")) for each in self.api.workers()["data"]) == count)

    def wait_for_end(self, run: RunDir) -> None:
        """Until the job is over."""
        self.until(lambda: run.record().status.terminal)

    def until(self, condition: Callable[[], object]) -> None:
        """Look until it is so."""
        until(condition, self.output, WITHIN_S)
