"""Three trials share a GPU without room for all, with torch's CUDA build. One runs out of memory: no other notices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.answers import Trial
from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded, AttemptStarted, Event
from jobs.gpus import GpuFacts
from jobs.memory_plan import TEST_LIMIT
from jobs.text.units import MIB
from jobs.trainer_facts import MemoryPlanned
from tests.simulated_gpu.machine import JOB as USUAL
from tests.simulated_gpu.machine import Machine
from tests.support.samples import facts_of
from worker.training.planning.memory_plan import CONTEXT_BYTES

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
GPU_MIB = 4608
LIMIT = CONTEXT_BYTES + 256 * MIB
"""Of each attempt: the trial with the largest micro-batch was planned for more."""
TOO_MANY = 128
JOB: dict[str, Any] = USUAL | {
    "data": {"train": "rows.jsonl", "validation": 0.1},
    "training": {"max_steps": 3, "batch_size": TOO_MANY},
    "memory": {"on_oom": "fail"},
}


def reserved(run: RunDir) -> int:
    bytes = run.plan().memory.reserved_bytes  # type: ignore[union-attr]
    assert bytes is not None
    return bytes


def most_at_once(runs: list[RunDir]) -> tuple[int, int]:
    """The most trials that trained at one time, and the most bytes that such had reserved."""
    moves: list[tuple[float, int, int]] = []
    for run in runs:
        for event in run.events():
            if isinstance(event.fact, (AttemptStarted, AttemptEnded)):
                sign = 1 if isinstance(event.fact, AttemptStarted) else -1
                moves.append((event.at, sign, sign * reserved(run)))
    trials, held, most = 0, 0, (0, 0)
    for _, one, bytes in sorted(moves):
        trials, held = trials + one, held + bytes
        most = max(most[0], trials), max(most[1], held)
    return most


def test_a_trial_that_runs_out_of_memory_disturbs_none_of_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = (json.dumps({"input": f"{number} bread " * 40, "target": f"bake {number} " * 40}) for number in range(256))
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(rows))
    gpu = {TEST_LIMIT: str(LIMIT), "SIMGPU_TOTAL_MIB": str(GPU_MIB), "LONGHAUL_TRIALS_AT_ONCE": "3"}
    with Machine(tmp_path, **gpu) as machine:

        def trials(parallel: int, *micro_batches: int) -> dict[int, Trial]:
            """Those of a sweep that has ended, by micro-batch."""
            space = {"memory.micro_batch": [*micro_batches]}
            wanted = {"job": JOB, "space": space, "sampler": "grid", "parallel": parallel, "keep_models": "all"}
            sweep = machine.api.submit_sweep(wanted)["id"]
            machine.until(lambda: machine.api.sweep(sweep)["status"] != "running")
            assert machine.api.sweep(sweep)["status"] == "succeeded"
            return {trial["settings"]["memory.micro_batch"]: trial for trial in machine.api.sweep_trials(sweep)}

        def run_of(trial: Trial) -> RunDir:
            [job] = trial["jobs"]
            return RunDir(tmp_path / "runs" / job)

        def story(trial: Trial) -> list[str]:
            """What happened to it, in order."""
            events: list[Event] = run_of(trial).events()
            return [event.type for event in events]

        machine.wait_for_workers(3)
        found, alone = trials(3, 1, TOO_MANY, 2), trials(1, 1, 2)

        together = [run_of(trial) for trial in found.values()]
        room = GpuFacts("", GPU_MIB * MIB).limit_bytes
        assert sum(map(reserved, together)) > room, "not all have room at once"
        trained, held = most_at_once(together)
        assert trained > 1 and held <= room
        assert most_at_once([run_of(trial) for trial in alone.values()])[0] == 1
        failed = found.pop(TOO_MANY)
        assert failed["error"] is not None and failed["error"]["code"] == "out_of_memory", failed
        assert "memory.on_oom is fail" in failed["error"]["message"]
        [planned] = facts_of(run_of(failed), MemoryPlanned)
        assert planned.peak_bytes > LIMIT and planned.budget_bytes == reserved(run_of(failed))
        for micro_batch, trial in found.items():
            twin = alone[micro_batch]
            assert (trial["status"], trial["value"], story(trial)) == ("succeeded", twin["value"], story(twin))
            weights, its = ((run_of(each).model / "model.safetensors").read_bytes() for each in (trial, twin))
            assert weights == its
            used = [row.gpu_memory_used_bytes or 0 for row in run_of(trial).metrics()]
            assert 0 < max(used) <= GPU_MIB * MIB
