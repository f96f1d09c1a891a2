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
from jobs.text.units import GIB, MIB
from tests.simulated_gpu.trainers import TURING, train
from tests.training.workplace import Workplace, pairs
from worker.child import JsonChild
from worker.training.machine.locks import try_lock
from worker.training.planning.memory_plan import CONTEXT_BYTES

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(1200)]
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
    train(run, **TURING)
    return run


@contextmanager
def child(run: RunDir, limit: int) -> Iterator[JsonChild]:
    environment = os.environ | {"LONGHAUL_DEVICE": "cuda", PARENT_PID: str(os.getpid())} | TURING
    command = [sys.executable, "-m", "worker.training", "generate", str(run.path), "--gpu-limit", str(limit)]
    process = JsonChild(command, environment)
    try:
        yield process
    finally:
        process.kill()


def part_of(process: JsonChild, *types: str) -> dict[str, Any]:
    """The first of these. (A GPU that computes nothing never writes an end token, nor anything that ends otherwise.)"""
    process.ask({"id": "1", "body": {"input": "question 1 about bread", "max_new_tokens": 4}})
    while True:
        part = cast("dict[str, Any] | None", process.answer(300.0))
        assert part is not None, "no answer"
        if part["type"] in types:
            return part


def test_it_is_loaded_under_the_lock_of_the_gpu_and_within_its_limit(run: RunDir) -> None:
    [lock] = (run.path.parent / ".locks").glob("gpu-*.lock")
    with child(run, CONTEXT_BYTES + GIB) as process:
        assert part_of(process, "loaded", "error")["type"] == "loaded"
        assert try_lock(lock) is None, "a trainer would wait for it"
    with child(run, CONTEXT_BYTES + MIB) as process:
        refused = part_of(process, "loaded", "error")
        assert refused["data"]["code"] == "out_of_memory", refused


def test_where_a_trainer_has_the_gpu_it_says_so_and_ends(run: RunDir) -> None:
    [file] = (run.path.parent / ".locks").glob("gpu-*.lock")
    lock = try_lock(file)
    assert lock is not None
    with lock, child(run, CONTEXT_BYTES + GIB) as process:
        assert part_of(process, "loaded", "error")["data"]["code"] == "device_busy"
