"""How much is padded, how alike steps are, and whether the order of rows costs quality: against plain shuffling.

    python -m benchmarks.padding [--data FILE] [--tokenizer FOLDER] [--batch-size 128] [--quality-rows 4000] [--seeds 3]

The file is prepared as a job would have it; without a tokenizer one is learned from the rows. Then, without training:
`waste_fraction` is the share of FLOPs (FLAN-T5-XL's) that one epoch of our order spends on padding, rounding to
multiples of 8 included; the same for random micro-batches of 8 rows padded to their longest (`random_waste_fraction`).
`step_std_ratio` is the standard deviation of the target tokens of a step over that of randomly drawn steps.
`rows_per_step_min` and `_max` are over the whole epoch, its last step (which takes what is left) apart.

With training: the built-in model, one epoch over the first `--quality-rows` rows in steps of 32 rows, in our order and
in plain random order from the same weights; the validation losses, seed by seed. JSON on the last line. Exit code 1
when a limit is broken: waste at most 0.05, the ratio at most 1, and a mean loss at most one standard error worse.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.command_line import RECIPES, parse
from benchmarks.corpus import dataset_of, prepared_job
from jobs.disk.rundir import RunDir
from jobs.spec import TrainingSpec
from jobs.text.units import format_duration
from worker.training.dataset.data import Int64, Rows
from worker.training.loop import accumulate
from worker.training.network.model import load
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.steps.order import StepOrder, rounded
from worker.training.steps.randomness import seed_step
from worker.training.tasks.limits import cut
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.batches import PairLimit
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.widths import PairWidths

KEYS = (
    "rows", "waste_fraction", "random_waste_fraction", "rounding_waste_fraction", "micro_batches_per_step",
    "rows_per_step_min", "rows_per_step_max", "step_std_ratio", "losses", "loss_difference", "loss_difference_error",
)  # fmt: skip
WASTE_LIMIT = 0.05
QUALITY_BATCH = 32


def main(argv: list[str]) -> int:
    """Prepare, count, train, print."""
    arguments = parsed(argv)
    with tempfile.TemporaryDirectory(prefix="longhaul-padding-") as scratch:
        parts = {"config": builtin.CONFIG | {"vocab_size": 32128}} if arguments.tokenizer else {}
        run = prepared_job(
            arguments.data, Path(scratch) / "counted", tokenizer=arguments.tokenizer, data={"validation": 0.0}, **parts
        )
        result: dict[str, Any] = counted(dataset_of(run).train, arguments.batch_size)
        print(json.dumps(result, indent=1), flush=True)
        if arguments.quality_rows:
            result |= quality(arguments, Path(scratch) / "trained")
    good = result["waste_fraction"] <= WASTE_LIMIT and result["step_std_ratio"] <= 1
    good &= result["rows_per_step_min"] == result["rows_per_step_max"]
    good &= not arguments.quality_rows or result["loss_difference"] <= result["loss_difference_error"]
    print(json.dumps(result))
    return 0 if good or arguments.smoke else 1


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding", description="Padding, and what it costs.")
    parser.add_argument("--data", type=Path, default=RECIPES, help="a file of rows")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--quality-rows", type=int, default=4000, help="0: without training")
    parser.add_argument("--seeds", type=int, default=3)
    return parse(parser, argv, batch_size=16, quality_rows=48, seeds=1)


# -- counting ------------------------------------------------------------------------------------------------


def counted(rows: Rows, batch_size: int) -> dict[str, float]:
    """Padding and steps of one epoch."""
    order = StepOrder(PairWidths(rows), batch_size, 1, seed=42)
    limit = PairLimit.of(rows, 8)
    shuffled = np.random.default_rng(0).permutation(len(rows))
    steps = [order.groups_of(step) for step in range(order.steps)]
    ours = [piece for groups in steps for piece in cut(rows, groups, limit)]
    peers = [shuffled[start : start + 8] for start in range(0, len(shuffled), 8)]
    sizes = [sum(map(len, groups)) for groups in steps]
    tokens = np.array([sum(int(rows.target_lengths[group].sum()) for group in groups) for groups in steps[:-1]])
    random_steps = shuffled[: len(tokens) * batch_size].reshape(-1, batch_size)
    real = float(row_flops(rows.input_lengths.astype(float), rows.target_lengths.astype(float)).sum())
    return {
        "rows": len(rows),
        "waste_fraction": 1 - real / sum(padded(rows, piece) for piece in ours),
        "random_waste_fraction": 1 - real / sum(padded(rows, piece) for piece in peers),
        "rounding_waste_fraction": 1 - real / float(
            row_flops(rounded(rows.input_lengths) * 1.0, rounded(rows.target_lengths) * 1.0).sum()
        ),
        "micro_batches_per_step": len(ours) / len(steps),
        "rows_per_step_min": min(sizes[:-1] or sizes),
        "rows_per_step_max": max(sizes),
        "step_std_ratio": float(tokens.std() / rows.target_lengths[random_steps].sum(1).std()),
    }  # fmt: skip


def row_flops(inputs: Any, targets: Any) -> Any:
    """Forward and backward of FLAN-T5-XL: weights met by input and by target tokens, and attention. [rows]"""
    attention = 24 * 4 * 2048 * (inputs**2 + targets**2 + inputs * targets)
    return 3 * (2 * (1358.9e6 * inputs + 1424.7e6 * targets) + attention)


def padded(rows: Rows, chosen: Int64) -> float:
    """FLOPs of a micro-batch, padded to its longest row and that to a multiple of 8."""
    inputs, targets = rounded(rows.input_lengths[chosen]).max(), rounded(rows.target_lengths[chosen]).max()
    return float(len(chosen) * row_flops(np.float64(inputs), np.float64(targets)))


# -- training ------------------------------------------------------------------------------------------------


def quality(arguments: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Validation losses after one epoch, ours and shuffled, the same weights and number of steps."""
    scratch.mkdir()
    some = scratch / "some.jsonl"
    with gzip.open(arguments.data) if arguments.data.name.endswith(".gz") else open(arguments.data, "rb") as lines:
        some.write_bytes(b"".join(itertools.islice(lines, arguments.quality_rows)))
    run = prepared_job(some, scratch, data={"validation": 0.1})
    losses: dict[str, list[float]] = {"ours": [], "shuffled": []}
    for seed, name in itertools.product(range(arguments.seeds), losses):
        begun = time.perf_counter()
        losses[name].append(trained(run, name, seed))
        print(
            f"seed {seed}, {name:8}: {losses[name][-1]:.4f}, {format_duration(time.perf_counter() - begun)}", flush=True
        )
    differences = [ours - shuffled for ours, shuffled in zip(losses["ours"], losses["shuffled"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return {"losses": losses, "loss_difference": statistics.fmean(differences), "loss_difference_error": error}


def trained(run: RunDir, name: str, seed: int) -> float:
    """Validation loss of the built-in model after one epoch."""
    plan = run.plan()
    data = dataset_of(run)
    assert plan.model.folder is not None
    folder, device = Path(plan.model.folder), torch.device("cpu")
    loaded = load(folder, device, task=Seq2Seq(), dropout=0.0, fused=True, activation_checkpointing=0)
    optimizer = make_optimizer(
        "adamw", loaded.model.named_parameters(), TrainingSpec(learning_rate=2e-3, warmup_ratio=0.0), fused=True
    )
    order, widths = StepOrder(PairWidths(data.train), QUALITY_BATCH, 1, seed), PairWidths(data.train)
    shuffled = np.random.default_rng(seed).permutation(len(data.train))
    limit = PairLimit.of(data.train, 8)
    loaded.model.train()
    for step in range(order.steps):
        rows = shuffled[step * QUALITY_BATCH : (step + 1) * QUALITY_BATCH]
        groups = order.groups_of(step) if name == "ours" else widths.groups(rows, 8)
        seed_step(seed, step)
        loss = accumulate(loaded.model, limit.batches(data.train, groups, 0))
        optimizer.step(step + 1, 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / order.steps), loss)
        loaded.model.zero_grad(set_to_none=True)
    return validation_loss(loaded.model, data.validation)


def validation_loss(model: PreTrainedModel, rows: Rows) -> float:
    groups = PairWidths(rows).groups(np.arange(len(rows)), 16)
    batches = PairLimit.of(rows, 16).batches(rows, groups, 0)
    model.eval()
    with torch.no_grad():
        total = sum(float(batch.loss_sum(model)) for batch in batches)
    return total / sum(batch.target_tokens for batch in batches)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
