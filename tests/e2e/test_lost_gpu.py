"""The GPU goes away under a worker that has found it: no job fails, and they continue with the next worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

from jobs.events import AttemptEnded, DeviceWaiting
from jobs.reasons import Reason
from jobs.state import Status
from tests.e2e.fake_gpu import SAID, machine
from tests.fakes import FakeDiscord
from tests.stack import Stack, tiny_job


def test_jobs_outlive_a_lost_gpu_unharmed_and_uncounted(tmp_path: Path, data: Path) -> None:
    with (
        FakeDiscord() as discord,
        Stack(tmp_path / "home", data=data, environment={"DISCORD_WEBHOOK": discord.url}) as stack,
    ):
        environment, gpu = machine(tmp_path / "machine", stack.environment["PATH"])
        stack.start("service", "check", "prepare", "publish")
        plain = dict(stack.environment)
        stack.environment |= environment

        def trainer() -> dict[str, Any] | None:
            workers = requests.get(f"{stack.url}/workers", timeout=5).json()["data"]
            return next((worker for worker in workers if worker["stage"] == "train" and worker["healthy"]), None)

        # Lost while the worker has nothing to do: the next job is not even claimed.
        stack.start("train")
        stack.wait_for(trainer, "a worker with a GPU")
        worker = stack.processes.pop("train")
        gpu.unlink()
        run = stack.submit(tiny_job(name="first", training={"epochs": 1, "batch_size": 8}, max_restarts=0))
        waiting = stack.wait_for_event(run, "device.waiting", "attempt.started")
        assert isinstance(waiting.fact, DeviceWaiting) and SAID in waiting.fact.message
        assert worker.wait(300) == Reason.GPU_LOST.exit_code
        assert run.record().attempt == 0 and SAID in stack.shown(run)["waiting_reason"]

        # Lost by its trainer, while another job waits.
        second = stack.submit(tiny_job(name="second", training={"epochs": 1, "batch_size": 8}, max_restarts=0))
        stack.wait_for_event(second, "job.queued")
        gpu.touch()
        stack.start("train")
        worker = stack.processes.pop("train")
        stack.wait_for_event(run, "attempt.ended")
        assert worker.wait(300) == Reason.GPU_LOST.exit_code
        end, queued, waits = [event.fact for event in run.events()][-3:]
        assert isinstance(end, AttemptEnded) and end.reason == "gpu_lost" and end.error is not None
        assert end.error.code == "gpu_lost" and SAID in end.error.message
        assert "nvidia-smi" in str(end.error.hint) and "Xid" in str(end.error.hint)
        assert queued.type == "job.queued" and isinstance(waits, DeviceWaiting) and SAID in waits.message
        assert (run.record().restarts, run.record().attempt, second.record().attempt) == (0, 1, 0)
        discord.wait_for(lambda: "first: waits for a GPU" in discord.titles)

        # Without a GPU the next worker takes nothing; when there is one again, all continues.
        stack.start("train")
        stack.wait_for(
            lambda: ("LONGHAUL_DEVICE=cuda, but" in (stack.home / "train.log").read_text()) or None, "its complaint"
        )
        assert trainer() is None
        stack.stop("train")
        stack.environment = plain
        stack.start("train")
        for each in (run, second):
            assert stack.wait_for_event(each, "job.succeeded", "job.failed").type == "job.succeeded"
            assert (each.record().status, each.record().restarts) == (Status.SUCCEEDED, 0)
