"""What clearing the allocator's cache costs: at every step, every 10th, every 50th, and never.

    python -m benchmarks.cache_clearing [--rounds 3] [--steps 50] [--batch-size 8]

The real loop (`loop.steps`) over rows of random tokens with the lengths of recipes, and the real `Cache`; on a GPU if
there is one, else on the CPU; a small T5 with random weights. The four intervals take turns, in the opposite order in
every second round. JSON on the last line: `step_time_ratio` (time of a step, clearing included, in that without any;
medians over rounds), `clear_s` (one clearing), `rss_or_reserved_growth` (bytes that the process, or torch on a GPU,
holds more after the steps than before) and `freed_bytes` (given back by all clearings of a turn), by interval.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.command_line import parse
from benchmarks.random_rows import random_rows, synthetic_lengths
from jobs.spec import parse_spec
from tests.support.samples import dataset_summary
from tests.training.contexts import as_loaded, training_context
from worker.training.dataset.data import FORMAT, Manifest, PreparedDataset
from worker.training.journal import Journal
from worker.training.loop import steps
from worker.training.machine.usage import process_bytes
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.tasks.seq2seq.fused import fuse

KEYS = (
    "device", "rounds", "step_s", "step_time_ratio", "clear_s", "rss_or_reserved_growth", "freed_bytes",
)  # fmt: skip
INTERVALS = (0, 1, 10, 50)
"""Steps between two clearings; 0: never."""
VOCABULARY = 32128
LONGEST_ON_CPU = 48
"""Tokens: longer rows are cut, so that a step is short and clearing shows."""


@dataclass(frozen=True)
class ClearingTurn:
    """One interval's steps in one round."""

    step_s: float
    """On a CPU of processor time."""
    clear_s: float | None
    """Of one clearing; None where there was none."""
    growth: int
    freed: int


def main(argv: list[str]) -> int:
    """Measure, and print the JSON line."""
    arguments = parsed(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = synthetic_lengths(arguments.steps * arguments.batch_size)
    if device.type == "cpu":
        lengths = lengths.clip(8, LONGEST_ON_CPU)
    turns: dict[int, list[ClearingTurn]] = {every: [] for every in INTERVALS}
    with tempfile.TemporaryDirectory(prefix="longhaul-cache-") as folder:
        random_rows(lengths, VOCABULARY // 8, Path(folder))
        (Path(folder) / "validation.rows").touch()
        manifest = Manifest(format=FORMAT, dtype="<u2", report=dataset_summary(), files={})
        data, model = PreparedDataset(Path(folder), manifest), small_t5(device)
        gc.freeze()  # as the trainer does
        take_turn(model, data, 0, arguments, Path(folder))  # kernels are chosen, buffers made
        for number in range(arguments.rounds):
            for every in INTERVALS if number % 2 == 0 else reversed(INTERVALS):
                turns[every].append(take_turn(model, data, every, arguments, Path(folder)))
                print(f"round {number + 1}, every {every or 'never'}: {turns[every][-1]}", file=sys.stderr)
    print(json.dumps({"device": device_name(device), "rounds": arguments.rounds, **summary(turns)}))
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache_clearing", description="What clearing costs.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="steps of one turn")
    parser.add_argument("--batch-size", type=int, default=8)
    return parse(parser, argv, rounds=1, steps=2, batch_size=2)


def small_t5(device: torch.device) -> T5ForConditionalGeneration:
    """FLAN-T5-XL's width with 4 + 4 layers on a GPU; on a CPU far less, so that steps are short."""
    width, layers, vocabulary = (2048, 4, VOCABULARY) if device.type == "cuda" else (128, 1, VOCABULARY // 8)
    torch.manual_seed(0)
    config = T5Config(  # type: ignore[call-arg]  # some are of every configuration
        vocab_size=vocabulary, d_model=width, d_kv=64, d_ff=width * 5 // 2, num_layers=layers, num_heads=width // 64,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).bfloat16()
    model.to(device)  # type: ignore[arg-type]  # wrapped by transformers
    fuse(model)
    return model


def take_turn(
    model: T5ForConditionalGeneration, data: PreparedDataset, every: int, arguments: argparse.Namespace, folder: Path
) -> ClearingTurn:
    """So many steps from the first one on, and a clearing after every `every`-th."""
    training = {"epochs": 1, "batch_size": arguments.batch_size}
    spec = parse_spec({"data": {"train": "rows.jsonl"}, "training": training, "memory": {"micro_batch": 4}})
    optimizer = make_optimizer("adafactor", model.named_parameters(), spec.training, fused=True)
    journal = Journal(folder / "journal.jsonl")
    context = training_context(folder, as_loaded(model, spec), data, spec, optimizer, journal)
    cache, plan = context.cache, context.plan
    # What others do on a shared machine is not this loop's time; on a GPU it is the host's clock that tells.
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    before, began = held(model.device), clock()
    for result in steps(context):
        if every and result.step % every == 0:
            cache.clear()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return ClearingTurn(
        step_s=(clock() - began) / plan.steps,
        clear_s=cache.seconds / cache.clears if cache.clears else None,
        growth=held(model.device) - before,
        freed=cache.freed,
    )


def held(device: torch.device) -> int:
    """Bytes: reserved by torch on a GPU, else resident."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else process_bytes("VmRSS")


def summary(turns: dict[int, list[ClearingTurn]]) -> dict[str, object]:
    """Medians over rounds, by interval (`never`, `1`, …)."""
    medians = {every: statistics.median(turn.step_s for turn in taken) for every, taken in turns.items()}
    clears = {
        every: [turn.clear_s for turn in taken if turn.clear_s is not None] for every, taken in turns.items() if every
    }
    names = {every: str(every or "never") for every in turns}
    return {
        "step_s": {names[every]: round(value, 5) for every, value in medians.items()},
        "step_time_ratio": {names[every]: round(value / medians[0], 4) for every, value in medians.items() if every},
        "clear_s": {names[every]: round(statistics.median(taken), 5) for every, taken in clears.items() if taken},
        "rss_or_reserved_growth": {
            names[every]: round(statistics.median(turn.growth for turn in taken)) for every, taken in turns.items()
        },
        "freed_bytes": {
            names[every]: round(statistics.median(turn.freed for turn in taken)) for every, taken in turns.items()
        },
    }


def device_name(device: torch.device) -> str:
    """Of the GPU, or how many threads."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
