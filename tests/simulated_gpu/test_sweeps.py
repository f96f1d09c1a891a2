"""A sweep under a whole `longhaul local` with torch's CUDA build: one trial runs out of memory, the others do not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import MemoryPlanned
from jobs.memory_plan import TEST_LIMIT
from jobs.text.units import MIB
from longhaul.answers import TrialDict
from tests.facts import facts_of
from tests.local import ROOT, Local, until
from worker.training.planning.memory_plan import CONTEXT_BYTES

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
LIMIT = CONTEXT_BYTES + 256 * MIB
"""Of each attempt, which was planned for the whole GPU."""
TOO_MANY = 128
JOB: dict[str, Any] = {
    "model": "builtin:t5-tiny",
    "data": {"train": "rows.jsonl", "validation": 0.1},
    "training": {"max_steps": 3, "batch_size": TOO_MANY},
    "memory": {"on_oom": "fail"},
    "evaluation": {"every_steps": 1000, "samples": 0, "generate_rows": 0},  # no text would ever end
    "speed": {"compile": False},
}


def test_a_trial_that_runs_out_of_memory_is_a_result_and_no_other_notices(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = (json.dumps({"input": f"{number} bread " * 40, "target": f"bake {number} " * 40}) for number in range(256))
    (tmp_path / "data" / "rows.jsonl").write_text("\n".join(rows))
    environment = {**os.environ, "SIMGPU_STATE": str(tmp_path / "gpu"), "LONGHAUL_DEVICE": "cuda"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment |= {TEST_LIMIT: str(LIMIT)}
    ours = {name: environment[name] for name in environment if not name.startswith(("LONGHAUL_URL", "LONGHAUL_PORT"))}
    with Local(tmp_path, environment=ours) as local:

        def trials(*micro_batches: int) -> dict[int, TrialDict]:
            """Those of a sweep that has ended, by micro-batch."""
            sweep = local.api.submit_sweep(
                {"job": JOB, "space": {"memory.micro_batch": [*micro_batches]}, "sampler": "grid"}
            )["id"]
            until(lambda: local.api.sweep(sweep)["status"] != "running", local.output, 400)
            assert local.api.sweep(sweep)["status"] == "succeeded"
            return {trial["settings"]["memory.micro_batch"]: trial for trial in local.api.sweep_trials(sweep)}

        def story(trial: TrialDict) -> list[str]:
            """What happened to it, in order."""
            [job] = trial["jobs"]
            return [event.type for event in RunDir(tmp_path / "runs" / job).events()]

        found, undisturbed = trials(1, TOO_MANY, 2, 4), trials(1, 2, 4)
        failed = found.pop(TOO_MANY)
        assert failed["error"] is not None and failed["error"]["code"] == "out_of_memory", failed
        assert "memory.on_oom is fail" in failed["error"]["message"]
        [planned] = facts_of(RunDir(tmp_path / "runs" / failed["jobs"][0]), MemoryPlanned)
        assert planned.micro_batch == TOO_MANY and LIMIT < planned.peak_bytes <= planned.budget_bytes
        for micro_batch, trial in found.items():
            assert (trial["status"], trial["value"]) == ("succeeded", undisturbed[micro_batch]["value"])
            assert story(trial) == story(undisturbed[micro_batch])
