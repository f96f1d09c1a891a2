"""A job on two GPUs under a whole `longhaul local`, with torch's CUDA build: a rank is killed, then a GPU is lost.

A simulated GPU has no NCCL: gradients go over gloo, and are zero.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted
from jobs.trainer_facts import ModelLoaded
from tests.support.local import ROOT, Local, until
from tests.support.samples import facts_of
from worker.training.ranks.group import TEST_GLOO

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
FIRST, SECOND = "GPU-51a00000-0000-4000-8000-000000000000", "GPU-51a00000-0000-4000-8000-000000000001"
JOB: dict[str, Any] = {
    "model": "builtin:t5-tiny",
    "data": {"train": "recipes.jsonl", "validation": 0.1},
    "training": {"epochs": 20, "batch_size": 16},
    "evaluation": {"every_steps": 1000, "samples": 0, "generate_rows": 0},  # no text would ever end
    "checkpoint": {"every_steps": 20},
    "speed": {"compile": False},
}


def ranks_of(run: RunDir) -> list[int]:
    """Pids of the processes of a job's other ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"follow" in words and os.fsencode(run.path) in words:
            found.append(int(folder.name))
    return found


def test_two_gpus_train_a_job_and_go_on_after_one_of_its_processes_was_killed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / "examples/recipes.jsonl", tmp_path / "data")
    environment = {
        **os.environ, "SIMGPU_STATE": str(tmp_path / "gpus"), "SIMGPU_CARDS": "2", "SIMGPU_TOTAL_MIB": "8192",
        "LONGHAUL_DEVICE": "cuda", "LONGHAUL_TRIALS_AT_ONCE": "1", "LONGHAUL_GPUS": "0+1", TEST_GLOO: "1",
    }  # fmt: skip
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ours = {name: environment[name] for name in environment if not name.startswith(("LONGHAUL_URL", "LONGHAUL_PORT"))}

    def held(number: int) -> int:
        """MiB that are taken of a GPU."""
        show = [sys.executable, "-m", "simgpu", "show"]
        told = subprocess.run(show, env=environment, check=True, capture_output=True, text=True).stdout
        return int(told.splitlines()[number].split(": there, ")[1].split(" of ")[0])

    def gpu_is(verb: str, number: int) -> None:
        subprocess.run([sys.executable, "-m", "simgpu", verb, str(number)], env=environment, check=True)

    with Local(tmp_path, environment=ours) as local:

        def submit(name: str, gpus: int, **training: object) -> RunDir:
            asked = {"name": name, "resources": {"gpus": gpus}, "training": JOB["training"] | training}
            return RunDir(tmp_path / "runs" / local.api.submit(JOB | asked)["id"])

        until(lambda: any(each.get("gpu") for each in local.api.workers()["data"]), local.output, 120)
        [gpu] = [each["gpu"] for each in local.api.workers()["data"] if each.get("gpu")]
        assert gpu is not None and (gpu["uuid"], gpu["count"]) == (f"{FIRST}+{SECOND}", 2)
        both, never = submit("both", 2), submit("never", 3)
        until(lambda: both.record().progress_step >= 20 and len(both.metrics()) > 2, local.output, 300)
        assert held(0) > 600 and held(1) > 600, "a context and a model are on each"
        [started] = facts_of(both, AttemptStarted)
        assert started.gpu == f"{FIRST}+{SECOND}" and (started.gpu_name or "").startswith("2 × NVIDIA")
        [rank] = ranks_of(both)
        os.kill(rank, signal.SIGKILL)
        until(lambda: both.record().attempt == 2, local.output, 120)
        [ended] = facts_of(both, AttemptEnded)
        assert ended.reason == "crash" and ended.error is not None and ended.error.code == "rank_lost"
        assert f"rank 1 (GPU {SECOND}) was killed by signal 9" in ended.error.message
        until(lambda: len(facts_of(both, ModelLoaded)) == 2 and both.record().attempt_open, local.output, 120)
        gpu_is("lose", 1)
        until(lambda: len(facts_of(both, AttemptEnded)) == 2, local.output, 120)
        lost = facts_of(both, AttemptEnded)[1]
        assert lost.reason == "gpu_lost" and both.record().restarts <= 1, "the loss of a GPU is no crash of the job"
        gpu_is("restore", 1)
        until(lambda: both.record().status.terminal, local.output, 400)
        assert both.record().status == "succeeded"
        assert (facts_of(both, ModelLoaded)[-1].resumed_step or 0) >= 20
        assert held(0) == held(1) == 0, "nothing is left on either"
        one = submit("one", 1, epochs=1)
        until(lambda: one.record().status.terminal, local.output, 200)
        assert one.record().status == "succeeded" and one.plan().resolved.gpus == 1
        assert (facts_of(one, AttemptStarted)[0].gpu_name or "").startswith("NVIDIA")
        until(lambda: never.record().waiting_reason is not None, local.output, 60)
        assert "a worker has 2 GPUs" in (never.record().waiting_reason or "")
