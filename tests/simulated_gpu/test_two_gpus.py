"""Two GPUs of different size under a whole `longhaul local`: which takes what, with torch's CUDA build. One is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted, MemoryPlanned
from tests.facts import facts_of
from tests.local import ROOT, Local, until

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
SMALL, LARGE = "GPU-51a00000-0000-4000-8000-000000000000", "GPU-51a00000-0000-4000-8000-000000000001"
JOB: dict[str, Any] = {
    "model": "builtin:t5-tiny",
    "data": {"train": "recipes.jsonl", "validation": 0.1},
    "evaluation": {"every_steps": 1000, "samples": 0},  # a simulated GPU computes nothing: no text would ever end
    "speed": {"compile": False},
    "max_restarts": 0,
}
LONG, SHORT = 400, 1
"""Epochs."""


def test_each_gpu_takes_what_it_can_and_goes_on_without_the_other(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "examples/recipes.jsonl", tmp_path / "data")
    environment = {
        **os.environ, "SIMGPU_STATE": str(tmp_path / "gpus"), "SIMGPU_CARDS": "2", "SIMGPU_TOTAL_MIB": "8192",
        "SIMGPU_NAME": "Small", "SIMGPU_TOTAL_MIB_1": "16384", "SIMGPU_NAME_1": "Large", "LONGHAUL_DEVICE": "cuda",
        "LONGHAUL_TRIALS_AT_ONCE": "1",
    }  # fmt: skip
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {name: environment[name] for name in environment if not name.startswith(("LONGHAUL_URL", "LONGHAUL_PORT"))}

    def gpu(verb: str, number: int) -> None:
        subprocess.run([sys.executable, "-m", "simgpu", verb, str(number)], env=environment, check=True)

    with Local(tmp_path, environment=ours) as local:

        def submit(name: str, epochs: int, **resources: object) -> RunDir:
            training = {"epochs": epochs, "batch_size": 16, "learning_rate": 5e-3}
            job = local.api.submit(JOB | {"name": name, "training": training, "resources": resources})
            return RunDir(tmp_path / "runs" / job["id"])

        def gpu_of(run: RunDir) -> str | None:
            """UUID of the GPU of its newest attempt."""
            started = facts_of(run, AttemptStarted)
            return started[-1].gpu if started else None

        until(lambda: sum(bool(each.get("gpu")) for each in local.api.workers()["data"]) == 2, local.output, 120)
        held = submit("held", LONG, gpu_memory_gib=16)
        until(lambda: len(held.metrics()) > 0, local.output, 240)
        assert gpu_of(held) == LARGE
        next_one, never = submit("next", SHORT, gpu_name="large"), submit("never", SHORT, gpu_name="h100")
        free = submit("free", SHORT)
        until(lambda: free.record().status.terminal, local.output, 240)
        assert (gpu_of(free), free.record().status) == (SMALL, "succeeded"), (
            "nobody waits behind those that cannot run here"
        )
        [planned] = facts_of(free, MemoryPlanned)
        assert planned.budget_bytes < 8 * 2**30, "planned for the large GPU, and again for this one"
        assert [next_one.record().status, never.record().status] == ["queued", "queued"]
        assert [each["can_take"] for each in local.api.get(next_one.id)["gpus"]] == [False, True]
        until(lambda: never.record().waiting_reason is not None, local.output, 60)
        assert never.record().waiting_reason == "no GPU here can take the job: Large is not 'h100'; Small is not 'h100'"

        gpu("lose", 1)
        until(lambda: held.record().status == "queued", local.output, 120)
        other = submit("other", SHORT)
        until(lambda: other.record().status.terminal, local.output, 240)
        assert (gpu_of(other), other.record().status) == (SMALL, "succeeded"), "it has lost nothing"
        gpu("restore", 1)
        until(lambda: held.record().attempt == 2 and held.record().attempt_open, local.output, 240)
        assert gpu_of(held) == LARGE and held.record().restarts == 0
        local.api.cancel(held.id)
        until(lambda: next_one.record().status.terminal, local.output, 240)
        assert (gpu_of(next_one), next_one.record().status) == (LARGE, "succeeded")
