"""Jobs in containers: POSTed from outside, stopped half-way, and refused without a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from tests.docker.engine import Containers, few, steps_logged
from tests.support.samples import reasons

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

KILL = """
import os, pathlib, signal, sys
for process in pathlib.Path("/proc").glob("[0-9]*"):
    command = process.joinpath("cmdline").read_bytes().split(b"\\0")
    if command[1:4] == [b"-m", b"worker", sys.argv[1].encode()] and len(command) == 5:
        os.kill(int(process.name), signal.SIGKILL)
"""


def test_stop_half_way_leaves_a_checkpoint_and_up_finishes_the_job_before_the_next(containers: Containers) -> None:
    spec = few(training={"epochs": 40, "batch_size": 8}, checkpoint={"every_minutes": 60})
    undisturbed = containers.submit(spec)
    containers.wait_for_status(undisturbed, "succeeded")
    run, behind = containers.submit(spec), containers.submit(few())
    containers.wait_for(lambda: steps_logged(run) >= 3 or None, "three steps", 300)
    containers.wait_for_status(behind, "queued")
    began = time.monotonic()
    containers.compose("stop")
    stopped_at = steps_logged(run)
    print(f"stopped in {time.monotonic() - began:.1f} s at step {stopped_at}")
    assert reasons(run) == ["interrupted"]
    assert run.record().status.value == "queued"
    [checkpoint] = run.checkpoints.glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) >= stopped_at > 0
    containers.up()
    for job in (run, behind):
        containers.wait_for_status(job, "succeeded")
    assert len([event for event in run.events() if event.type == "model.loaded"]) == 2  # once per attempt
    assert [row.step for row in run.metrics()] == [row.step for row in undisturbed.metrics()]
    assert (run.model / "model.safetensors").read_bytes() == (undisturbed.model / "model.safetensors").read_bytes()
    assert moment(run, "job.succeeded") <= moment(behind, "attempt.started")  # it was queued in its old place


def moment(run: RunDir, kind: str) -> float:
    """When the first event of a kind was written."""
    return next(event.at for event in run.events() if event.type == kind)


def test_without_a_gpu_no_job_is_taken_and_why_is_said(containers: Containers) -> None:
    containers.set(LONGHAUL_DEVICE="cuda")
    containers.compose("up", "-d", "worker")
    try:
        looks = containers.wait_for(lambda: health_checks(containers) or None, "the first health check")
        [worker] = containers.workers("train")
        assert worker["healthy"] is False and worker["why"]
        assert worker["why"] in looks[-1]["Output"] and looks[-1]["ExitCode"] == 1
        assert f"no job is taken: {worker['why']}" in containers.compose("logs", "worker")
        run = containers.submit(few())
        waiting = containers.wait_for(lambda: run.record().waiting_reason, "the job to say why it waits")
        shown = containers.http.get(f"{containers.url}/jobs/{run.id}", timeout=10).json()
        assert (shown["status"], shown["attempt"], shown["waiting_reason"]) == ("queued", 0, waiting)
        assert waiting == worker["why"] and "driver 580 or newer is needed" in waiting
        assert containers.container("worker")["State"]["Health"]["Status"] != "healthy"
    finally:
        containers.set(LONGHAUL_DEVICE="cpu")
        containers.up("worker")
    containers.wait_for_status(run, "succeeded")


def health_checks(containers: Containers) -> list[dict[str, Any]]:
    """Health checks of the worker that found its heartbeat and had something to say about it."""
    looks = containers.container("worker")["State"]["Health"]["Log"] or []
    return [look for look in looks if look["Output"] and "no heartbeat" not in look["Output"]]


@pytest.mark.parametrize(("service", "killed", "renewed"), [
    ("prepare", "check", {"check", "prepare", "push"}),  # workers in one container: when one ends all start anew
    ("worker", "train", {"train"}),
    ("generate", "generate", {"generate"}),
    ("publish", "publish", {"publish"}),
])  # fmt: skip
def test_killed_workers_are_back_at_once(containers: Containers, service: str, killed: str, renewed: set[str]) -> None:
    def workers() -> list[dict[str, Any]]:
        return [facts for stage in renewed for facts in containers.workers(stage)]

    before = {facts["name"] for facts in workers()}
    restarts = containers.container(service)["RestartCount"]
    containers.inside(service, "python", "-c", KILL, killed, check=False)  # it may go with its container
    back = lambda: {w["stage"] for w in workers() if w["name"] not in before} == renewed or None  # noqa: E731
    containers.wait_for(back, f"new workers: {renewed}", 40)
    assert containers.container(service)["RestartCount"] == restarts + 1
