"""The GPU goes away under a worker that has found it: no job fails, and they continue with the next worker."""

from __future__ import annotations

from pathlib import Path

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded
from jobs.heartbeat import WorkerHeartbeat
from jobs.reasons import Reason
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.trainer_facts import DeviceWaiting
from tests.e2e.fake_gpu import SAID, machine
from tests.support.fakes import FakeDiscord
from tests.support.shared_stack import restarted, succeeds
from tests.support.stack import Stack, tiny_job


def test_jobs_outlive_a_lost_gpu_unharmed_and_uncounted(stack: Stack, tmp_path: Path) -> None:
    environment, gpu = machine(tmp_path / "machine", stack.environment["PATH"])
    log, workers = stack.home / "train.log", Store(connect(stack.redis.url)).workers

    def trainer() -> WorkerHeartbeat | None:
        """A slot of the process that runs now; what a test before has killed is remembered for a minute."""
        pid = stack.processes["train"].pid
        return next((worker for worker in workers.all() if worker.parent_pid == pid and worker.healthy), None)

    def job(name: str) -> RunDir:
        training, integrations = {"epochs": 1, "batch_size": 8}, {"wandb": None}
        return stack.submit(tiny_job(name=name, training=training, integrations=integrations, max_restarts=0))

    with FakeDiscord() as discord, restarted(stack, "publish", DISCORD_WEBHOOK=discord.url):
        with restarted(stack, "train", **environment):
            # Lost while the worker has nothing to do: the next job is not even claimed.
            stack.wait_for(trainer, "a worker with a GPU")
            worker = stack.processes.pop("train")
            gpu.unlink()
            run = job("first")
            waiting = stack.wait_for_event(run, "device.waiting", "attempt.started")
            assert isinstance(waiting.fact, DeviceWaiting) and SAID in waiting.fact.message
            assert worker.wait(300) == Reason.GPU_LOST.exit_code
            assert run.record().attempt == 0 and SAID in stack.shown(run)["waiting_reason"]

            # Lost by its trainer, while another job waits.
            second = job("second")
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
            discord.wait_for(lambda: "first: waits for a GPU" in discord.titles, 300)

            # Without a GPU the next worker takes nothing; when there is one again, all continues.
            before = len(log.read_text())
            stack.start("train")
            stack.wait_for(lambda: "LONGHAUL_DEVICE=cuda, but" in log.read_text()[before:] or None, "its complaint")
            assert trainer() is None
        stack.start("train")
        succeeds(stack, run, second)
        assert [each.record().restarts for each in (run, second)] == [0, 0]
