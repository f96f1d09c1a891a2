"""A container whose memory runs out: the kernel ends the trainer, the supervisor lives, says so and continues.

Limits are a compose override's. The kernel ends a process of the container when no page is left under its limit; a file
in /dev/shm counts, too, and can be taken away again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jobs.events import AttemptEnded, JobFailed, JobQueued
from jobs.trainer_facts import ModelLoaded
from tests.docker.engine import COMPOSE_FILE, Containers, few, steps_logged
from tests.support.samples import facts_of, reasons
from worker.training.__main__ import OOM_SCORE_ADDED

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
TOO_LITTLE_MIB = 192
"""Two workers and a work-horse live in it; a trainer that imports torch does not."""
TOO_LITTLE_TO_CHECK_MIB = 320
"""The same of `prepare`, where workers of three roles live."""
ENOUGH_MIB = 1536
TRAINING = {"epochs": 40, "batch_size": 8}

FIND_TRAINER = """
import pathlib
found = {p: p / "fd" / "1" for p in pathlib.Path("/proc").glob("[0-9]*")}
[trainer] = [p for p, output in found.items() if output.exists() and output.readlink().name == "trainer.log"]
"""
KILL = FIND_TRAINER + "import os; os.kill(int(trainer.name), 9)"
FILL = (
    FIND_TRAINER
    + """
import json, os, signal
from worker.training.machine.host import oom_kills
os.kill(int(trainer.name), signal.SIGSTOP)
score, file, before, mib = (trainer / "oom_score_adj").read_text(), pathlib.Path("/dev/shm/filling"), oom_kills(), 0
with open(file, "wb", buffering=0) as filling:
    while oom_kills() == before and mib < LIMIT_MIB:
        mib += filling.write(bytes(1 << 20)) >> 20
file.unlink()
print(json.dumps({"score": int(score), "mib": mib, "killed": (oom_kills() or 0) - (before or 0)}))
"""
)
"""Fill the container's memory until the kernel ends a process in it, then give all of it back. The trainer stands still
meanwhile: were it done before memory is full, the kernel would have nobody to end but who fills it."""


@contextmanager
def limited(containers: Containers, service: str, mib: int) -> Iterator[None]:
    """The container of a service under a memory limit, without swap; afterwards without."""
    info = json.loads(containers.docker("info", "--format", "{{json .}}"))
    if not (info["MemoryLimit"] and info["SwapLimit"]):
        pytest.skip("this Docker engine cannot limit a container's memory")
    override = containers.home / "limited.yml"
    override.write_text(f"services: {{{service}: {{mem_limit: {mib}m, memswap_limit: {mib}m}}}}\n")
    try:
        containers.compose(
            "-f", COMPOSE_FILE, "-f", override.name, "up", "-d", "--wait", "--wait-timeout", "600", service
        )
        assert containers.container(service)["HostConfig"]["Memory"] == mib << 20
        yield
    finally:
        containers.up(service)


def worker_and_restarts(containers: Containers) -> tuple[str, int]:
    """Name (with pid) of the one train worker, and how often its container was restarted."""
    [worker] = containers.workers("train")
    return worker["name"], containers.container("worker")["RestartCount"]


def job(**changes: Any) -> dict[str, Any]:
    """Some 300 steps, with checkpoints."""
    return few(training=TRAINING, checkpoint={"every_steps": 40, "every_minutes": None}, **changes)


def test_a_limit_too_low_for_any_trainer_fails_the_job_and_says_how_to_help(containers: Containers) -> None:
    with limited(containers, "worker", TOO_LITTLE_MIB):
        before = worker_and_restarts(containers)
        run = containers.submit(job(max_restarts=1))
        [failed] = containers.wait_for(lambda: facts_of(run, JobFailed) or None, "the job to be given up", 300)
        assert reasons(run) == ["host_out_of_memory"] * 2
        assert failed.error.code == "host_out_of_memory"
        assert failed.error.message.startswith("the host's memory ran out and the kernel ended the trainer (phase ")
        assert failed.error.message.endswith("(given up after 1 restart without progress)")
        assert failed.error.hint and "more memory" in failed.error.hint
        shown = containers.http.get(f"{containers.url}/jobs/{run.id}", timeout=10).json()
        assert (shown["status"], shown["attempt"]) == ("failed", 2)
        assert worker_and_restarts(containers) == before  # neither the worker nor its container was hit


def test_a_check_that_ran_out_of_memory_is_told_in_the_log_and_done_when_the_limit_is_lifted(
    containers: Containers,
) -> None:
    with limited(containers, "prepare", TOO_LITTLE_TO_CHECK_MIB):
        run = containers.submit(job())
        told = (
            f"job {run.id}: stage check ended: the host's memory ran out and the kernel ended the trainer (phase check"
        )
        containers.wait_for(lambda: told in containers.compose("logs", "prepare") or None, "the log to say why")
        assert run.record().status.value == "validating"
    containers.wait_for_status(run, "succeeded")


def test_memory_that_runs_out_in_the_middle_is_told_apart_from_a_crash_and_costs_nothing(
    containers: Containers,
) -> None:
    undisturbed = containers.submit(job())
    containers.wait_for_status(undisturbed, "succeeded")
    with limited(containers, "worker", ENOUGH_MIB):
        before = worker_and_restarts(containers)
        run = containers.submit(job())
        containers.wait_for(lambda: steps_logged(run) >= 50 or None, "fifty steps", 300)
        said = json.loads(containers.inside("worker", "python", "-c", FILL.replace("LIMIT_MIB", str(ENOUGH_MIB))))
        assert (said["score"], said["killed"]) == (OOM_SCORE_ADDED, 1)
        print(f"the kernel ended the trainer when {said['mib']} MiB of {ENOUGH_MIB} were filled")
        containers.wait_for(lambda: facts_of(run, AttemptEnded) or None, "the first attempt to end")
        containers.wait_for(lambda: len(facts_of(run, ModelLoaded)) == 2 or None, "the second attempt to train", 120)
        containers.inside("worker", "python", "-c", KILL)  # the same signal from somebody else
        containers.wait_for_status(run, "succeeded")
        assert reasons(run) == ["host_out_of_memory", "killed", "done"]
        assert worker_and_restarts(containers) == before
    assert len(facts_of(run, JobQueued)) == 3
    steps = [row.step for row in run.metrics()]
    assert steps == [row.step for row in undisturbed.metrics()] == list(range(1, steps[-1] + 1))
    weights = [(each.model / "model.safetensors").read_bytes() for each in (run, undisturbed)]
    assert weights[0] == weights[1]
