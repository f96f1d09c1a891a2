"""Two GPUs of different size under a `longhaul local`: which takes what. One is lost, then both, and all come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted
from jobs.reasons import Reason
from jobs.trainer_facts import MemoryPlanned
from tests.simulated_gpu.machine import FIRST as SMALL
from tests.simulated_gpu.machine import SECOND as LARGE
from tests.simulated_gpu.machine import Machine
from tests.support.samples import facts_of

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
GPUS = {
    "SIMGPU_CARDS": "2", "SIMGPU_TOTAL_MIB": "8192", "SIMGPU_NAME": "Small", "SIMGPU_TOTAL_MIB_1": "16384",
    "SIMGPU_NAME_1": "Large", "LONGHAUL_TRIALS_AT_ONCE": "1",
}  # fmt: skip


def gpu_of(run: RunDir) -> str | None:
    """UUID of the GPU of its newest attempt."""
    started = facts_of(run, AttemptStarted)
    return started[-1].gpu if started else None


def test_each_gpu_takes_what_it_can_and_no_job_fails_while_one_or_both_are_lost(tmp_path: Path) -> None:
    with Machine(tmp_path, **GPUS) as machine:

        def submit(name: str, epochs: int = 1, **resources: object) -> RunDir:
            training = {"epochs": epochs, "batch_size": 16, "learning_rate": 5e-3}
            return machine.submit(name=name, training=training, resources=resources, max_restarts=0)

        machine.wait_for_workers(2)
        held = submit("held", 10_000, gpu_memory_gib=16)
        machine.until(lambda: len(held.metrics()) > 0)
        assert gpu_of(held) == LARGE
        next_one, never, free = submit("next", gpu_name="large"), submit("never", gpu_name="h100"), submit("free")
        machine.wait_for_end(free)
        assert (gpu_of(free), free.record().status) == (SMALL, "succeeded"), "nobody waits behind what cannot run here"
        [planned] = facts_of(free, MemoryPlanned)
        assert planned.budget_bytes < 8 * 2**30, "planned for the large GPU, and again for this one"
        assert [next_one.record().status, never.record().status] == ["queued", "queued"]
        assert [each["can_take"] for each in machine.api.get(next_one.id)["gpus"]] == [False, True]
        machine.until(lambda: never.record().waiting_reason is not None)
        assert never.record().waiting_reason == "no GPU here can take the job: Large is not 'h100'; Small is not 'h100'"

        machine.gpus("lose", 1)
        machine.until(lambda: held.record().status == "queued")
        [end] = facts_of(held, AttemptEnded)
        assert end.reason == Reason.GPU_LOST and end.error is not None and "GPU is lost" in end.error.message
        other = submit("other")
        machine.wait_for_end(other)
        assert (gpu_of(other), other.record().status) == (SMALL, "succeeded"), "it has lost nothing"

        machine.gpus("lose", 0)
        late = submit("late")  # an idle worker looks at its GPU when there is a job to take
        machine.until(lambda: "train lost its GPU; again in 1 s" in machine.output())
        machine.until(lambda: held.record().waiting_reason is not None)
        machine.until(lambda: any(not each["healthy"] for each in machine.api.workers()["data"]))
        machine.gpus("restore", 0, 1)
        machine.until(lambda: held.record().attempt == 2 and held.record().attempt_open)
        assert gpu_of(held) == LARGE
        machine.api.cancel(held.id)
        for run in (held, late, next_one):
            machine.wait_for_end(run)
        assert [run.record().status for run in (held, late, next_one)] == ["cancelled", "succeeded", "succeeded"]
        assert gpu_of(next_one) == LARGE and held.record().restarts == late.record().restarts == 0
