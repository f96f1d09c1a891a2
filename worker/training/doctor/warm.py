"""Compiling again, in another process, with what earlier groups have left in the caches."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from jobs.text.units import format_duration, format_share
from worker.training.doctor.exactness import fused_model, gradients
from worker.training.doctor.finding import Check, Examination, Finding, judge, skip
from worker.training.doctor.job import ListeningJournal
from worker.training.doctor.random_t5 import SHAPES, write_checkpoint
from worker.training.machine.numerics import prepare_device
from worker.training.network.model import load
from worker.training.tasks.seq2seq.task import Seq2Seq

SLOWER = 0.8
"""Share of the time with empty caches: beyond it the caches are not used."""


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name."""

    def compile_warm() -> Finding:
        cold, device = examination.compile_s, torch.device(examination.device)
        if cold is None or (device.type == "cuda" and examination.model is None):
            return skip("compile_warm", "nothing was compiled before")
        prepare_device(device)
        seconds = seconds_of_gradients(device) if device.type == "cpu" else seconds_of_layers(device, examination)
        return judge(
            "compile_warm", f"{format_duration(seconds)} with full caches, {format_duration(cold)} with empty ones",
            limit=f"≤ {format_share(SLOWER)} of that", warn=seconds > SLOWER * cold,
            hint="each attempt compiles anew: TORCHINDUCTOR_CACHE_DIR must be writable, and stay", seconds=seconds,
        )  # fmt: skip

    return {"compile_warm": compile_warm}


def seconds_of_gradients(device: torch.device) -> float:
    """Of what `compiled_gradients` has compiled; on a CPU nothing else is."""
    model = fused_model(device, compiled=True)
    begun = time.perf_counter()
    gradients(model)
    return time.perf_counter() - begun


def seconds_of_layers(device: torch.device, examination: Examination) -> float:
    """Of a job's layers. They share their graphs: two compile as 48 do. Raises RuntimeError where they do not."""
    config = SHAPES[str(examination.model)] | {"num_layers": 1, "num_decoder_layers": 1}
    folder, task = examination.folder / "model", Seq2Seq()
    write_checkpoint(folder, config)
    loaded = load(folder, device, task=task, dropout=None, fused=True, activation_checkpointing=0)
    journal = ListeningJournal(examination.folder / "journal.jsonl")
    begun = time.perf_counter()
    if failure := task.compile(loaded.model, journal):
        raise RuntimeError(f"layers are not compiled: {failure}")
    return time.perf_counter() - begun
