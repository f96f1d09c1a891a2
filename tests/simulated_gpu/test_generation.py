"""A finished model on a GPU: it holds the GPU's lock, stays under its own limit, and leaves where a trainer has it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from jobs.disk.rundir import RunDir
from jobs.gpus import GpuFacts
from jobs.process.lifeline import PARENT_PID
from jobs.reasons import Reason
from jobs.text.units import GIB, MIB
from tests.simulated_gpu.test_turing import python
from tests.training.attempts import finished
from tests.training.workplace import Workplace, pairs
from worker.child import JsonChild
from worker.training.machine.locks import try_lock
from worker.training.planning.memory_plan import CONTEXT_BYTES

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(600)]
GPU = GpuFacts("Quadro RTX 6000", 24_220 * MIB, native_bf16=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A job that was trained on the GPU."""
    workplace = Workplace(tmp_path_factory.mktemp("place") / "place")
    workplace.settings = dataclasses.replace(workplace.settings, device="cuda", gpu=GPU)
    workplace.rows("rows.jsonl", pairs(40))
    training = {"epochs": 1, "batch_size": 8}
    run = workplace.job(model="builtin:qwen-tiny", method="lora", training=training, evaluation={"samples": 0})
    workplace.prepare(run)
    done = python("worker.training", "train", str(run.path))
    assert finished(run).reason is Reason.DONE, done.stderr
    return run


@contextmanager
def child(run: RunDir, limit: int) -> Iterator[JsonChild]:
    environment = os.environ | {"LONGHAUL_DEVICE": "cuda", PARENT_PID: str(os.getpid())}
    environment |= {"SIMGPU_CC": "7.5", "SIMGPU_NAME": GPU.name, "SIMGPU_TOTAL_MIB": "24220"}
    command = [sys.executable, "-m", "worker.training", "generate", str(run.path), "--gpu-limit", str(limit)]
    process = JsonChild(command, environment)
    try:
        yield process
    finally:
        process.kill()


def last_part(process: JsonChild, body: dict[str, Any]) -> dict[str, Any]:
    process.ask({"body": body})
    while True:
        part = cast("dict[str, Any] | None", process.answer(300.0))
        assert part is not None, "no answer"
        if part["type"] in ("done", "error"):
            return part


def test_it_answers_under_the_lock_of_the_gpu_and_within_its_limit(run: RunDir) -> None:
    body = {"input": "question 1 about bread", "max_new_tokens": 4}
    [lock] = (run.path.parent / ".locks").glob("gpu-*.lock")
    with child(run, CONTEXT_BYTES + GIB) as process:
        done = last_part(process, body)
        assert done["type"] == "done" and done["data"]["device"] == "cuda", done
        assert try_lock(lock) is None, "a trainer would wait for it"
    with child(run, CONTEXT_BYTES + MIB) as process:
        refused = last_part(process, body)
        assert refused["data"]["code"] == "out_of_memory", refused
        assert "memory ran out" in refused["data"]["message"]


def test_where_a_trainer_has_the_gpu_it_says_so_and_ends(run: RunDir) -> None:
    [file] = (run.path.parent / ".locks").glob("gpu-*.lock")
    lock = try_lock(file)
    assert lock is not None
    with lock, child(run, CONTEXT_BYTES + GIB) as process:
        refused = last_part(process, {"input": "question 1 about bread"})
        assert refused["data"]["code"] == "device_busy"
