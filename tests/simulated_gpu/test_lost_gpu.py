"""The GPU falls off the bus under a whole `longhaul local`, with torch's CUDA build, and comes back.

Needs a simulated GPU that several processes share and that can be taken away: the module `simgpu` on PYTHONPATH
(`python -m simgpu lose`, `restore`), its libraries in LD_PRELOAD and LD_LIBRARY_PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded
from jobs.reasons import Reason
from tests.facts import facts_of
from tests.local import ROOT, Local, until

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(600)]
JOB = {
    "model": "builtin:t5-tiny",
    "data": {"train": "recipes.jsonl", "validation": 0.1},
    "evaluation": {"every_steps": 1000, "samples": 0},  # a simulated GPU computes nothing: no text would ever end
    "speed": {"compile": False},
    "max_restarts": 0,
}


def test_no_job_fails_and_all_go_on_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "examples/recipes.jsonl", tmp_path / "data")
    environment = {**os.environ, "SIMGPU_STATE": str(tmp_path / "gpu"), "LONGHAUL_DEVICE": "cuda"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {name: environment[name] for name in environment if not name.startswith(("LONGHAUL_URL", "LONGHAUL_PORT"))}

    def gpu(verb: str) -> None:
        subprocess.run([sys.executable, "-m", "simgpu", verb], env=environment, check=True)

    with Local(tmp_path, environment=ours) as local:
        runs = []
        for name, epochs in (("long", 400), ("second", 1)):
            training = {"epochs": epochs, "batch_size": 16, "learning_rate": 5e-3}
            runs.append(RunDir(tmp_path / "runs" / local.api.submit(JOB | {"name": name, "training": training})["id"]))
        long, second = runs
        until(lambda: len(long.metrics()) > 2 and second.record().status == "queued", local.output, 120)
        gpu("lose")
        until(lambda: long.record().waiting_reason is not None, local.output, 120)
        until(lambda: any(not worker["healthy"] for worker in local.api.workers()["data"]), local.output, 120)
        until(lambda: "train lost its GPU; again in 1 s" in local.output(), local.output, 60)
        [end] = facts_of(long, AttemptEnded)
        assert end.reason == Reason.GPU_LOST and end.error is not None and "GPU is lost" in end.error.message
        gpu("restore")
        until(lambda: long.record().attempt == 2 and long.record().attempt_open, local.output, 120)
        local.api.cancel(long.id)
        until(lambda: all(run.record().status.terminal for run in runs), local.output, 240)
        assert [run.record().status.value for run in runs] == ["cancelled", "succeeded"]
        assert [run.record().restarts for run in runs] == [0, 0]
