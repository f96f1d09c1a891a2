"""What it costs to add up the gradients of many micro-batches in bf16: the error of one step, and the loss at the end.

    python -m benchmarks.accumulation [--steps 1000] [--seeds 3] [--learning-rate 3e-4]

*Error*: a step of 128 rows goes through a tiny bf16 T5 with `worker.training.loop.accumulate` in 1, 16, 64 and 128
micro-batches. `bf16`: gradients are added up in bf16, as `.grad` of bf16 weights does. `fp32`: the same gradients are
added up in fp32. Each is compared with the gradient of the same weights computed in fp32 throughout: L2 norm of the
difference, as a share of the norm. `summation` is the share that the addition alone is answerable for.

*Loss*: a model trained on one task is fine-tuned on another (`benchmarks.bf16_quality`) for `--steps` steps of 128
rows with the trainer's `adamw`, from the same weights on the same rows: in fp32 and in bf16 at once, and in bf16 in 128
micro-batches of one row with both additions. The gradients of the 128 rows come from one call of `torch.func.vmap`,
which is five times as fast as 128 passes, and are then added up row by row. Another seed is other weights and other
rows. `excess` is the validation loss over that of fp32, as a share of it, for each seed. 20 minutes on one core;
`--steps 0` leaves it out.

JSON on the last line. Exit code 1 when adding up 128 micro-batches in bf16 costs more than `LIMIT` of the loss, on the
mean of the seeds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad_and_value, vmap
from transformers import T5ForConditionalGeneration

from benchmarks.bf16_quality import ROWS, batch, tiny_t5, torch_adamw, train, validation_loss
from benchmarks.command_line import parse
from jobs.spec import TrainingSpec
from worker.training.loop import accumulate
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.tasks.seq2seq.batches import PairBatch
from worker.training.tasks.seq2seq.fused import fuse

KEYS = (
    "error", "excess", "mean_excess", "steps", "seeds", "learning_rate", "pretrain_steps", "pieces", "smoke",
)  # fmt: skip
STEP_ROWS = 128
PIECES = (1, 16, 64, 128)
LIMIT = 0.01
Sum = Literal["bf16", "fp32"]
DTYPES: dict[Sum, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main(argv: list[str]) -> int:
    """Both measurements, the tables and the JSON line."""
    arguments = parsed(argv)
    torch.set_num_threads(1)
    errors = step_errors(arguments.pretrain_steps, arguments.pieces)
    for pieces, row in errors.items():
        print(f"{pieces:4} micro-batches:", "  ".join(f"{name} {share:.2%}" for name, share in row.items()), flush=True)
    excess: dict[str, list[float]] = {}
    for seed in range(arguments.seeds if arguments.steps else 0):
        for name, share in losses(seed, arguments).items():
            excess.setdefault(name, []).append(share)
    means = {name: statistics.fmean(shares) for name, shares in excess.items()}
    print(json.dumps({"error": errors, "excess": excess, "mean_excess": means, **vars(arguments)}))
    good = not means or means["bf16_128_bf16"] - means["bf16_1"] <= LIMIT
    return 0 if good or arguments.smoke else 1


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accumulation", description="Sums of gradients in bf16.")
    parser.add_argument("--steps", type=int, default=1000, help="steps of fine-tuning; 0: the error of one step only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--pretrain-steps", type=int, default=1000)
    parser.add_argument("--pieces", type=int, nargs="+", default=PIECES, help="micro-batches of a step")
    return parse(parser, argv, pieces=[1, 16], steps=1, seeds=1, pretrain_steps=1)


def step_errors(pretrain_steps: int, counts: Sequence[int]) -> dict[int, dict[str, float]]:
    """Number of micro-batches → error of the gradient of one step, by the precision of the sum."""
    model = pretrained(0, pretrain_steps, d_model=128, layers=2)
    fuse(model)
    reference = gradient(model.bfloat16().float(), 1, "fp32")
    model = model.bfloat16()
    table = {}
    for pieces in counts:
        sums: dict[Sum, torch.Tensor] = {name: gradient(model, pieces, name) for name in ("bf16", "fp32")}
        table[pieces] = {name: difference(total, reference) for name, total in sums.items()} | {
            "summation": difference(sums["bf16"], sums["fp32"])
        }
    return table


def gradient(model: T5ForConditionalGeneration, pieces: int, dtype: Sum) -> torch.Tensor:
    """[all trained numbers] fp32: the gradient of one step, added up in `dtype`."""
    model = copy.deepcopy(model)
    add_up_in(model, dtype)
    accumulate(model, step_batches(10**7, pieces))
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """L2 norm of the difference, as a share of that of `other`."""
    return float((one - other).norm() / other.norm())


def losses(seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Way of training → excess of its validation loss over that of fp32, as a share of it."""
    start = pretrained(seed, arguments.pretrain_steps, d_model=64, layers=1)
    print(f"seed {seed}: loss {validation_loss(start, True):.4f} at the start", flush=True)
    ends = {}
    ways: dict[str, tuple[torch.dtype, Sum | None]] = {
        "fp32_1": (torch.float32, None),
        "bf16_1": (torch.bfloat16, None),
        "bf16_128_bf16": (torch.bfloat16, "bf16"),
        "bf16_128_fp32": (torch.bfloat16, "fp32"),
    }
    for name, (dtype, by_row) in ways.items():
        model = copy.deepcopy(start)
        model.to(dtype)  # type: ignore[arg-type]  # wrapped by transformers
        optimizer = make_optimizer("adamw", model.named_parameters(), TrainingSpec(), fused=True)
        for step in range(1, arguments.steps + 1):
            (rows,) = step_batches(10**7 * (seed + 1) + step, 1)
            loss = accumulate(model, [rows]) if by_row is None else accumulate_rows(model, rows, by_row)
            optimizer.step(step, arguments.learning_rate, loss)
            model.zero_grad(set_to_none=True)
        ends[name] = validation_loss(model, True)
        print(f"seed {seed}: {name:14} loss {ends[name]:.4f}", flush=True)
    return {name: end / ends["fp32_1"] - 1 for name, end in ends.items() if name != "fp32_1"}


def accumulate_rows(model: T5ForConditionalGeneration, rows: PairBatch, dtype: Sum) -> torch.Tensor:
    """The same as `loop.accumulate` with every row as a micro-batch of its own, the gradients added up in `dtype`."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional_call(model, parameters, (), {"input_ids": ids[None], "labels": labels[None]}).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum") / rows.target_tokens

    each, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(parameters, rows.input_ids, rows.labels)
    add_up_in(model, dtype)
    for name, parameter in model.named_parameters():
        total = torch.zeros_like(parameter, dtype=DTYPES[dtype])
        for gradient in each[name]:
            total += gradient
        parameter.grad = total
    total_loss: torch.Tensor = losses.sum()
    return total_loss


def pretrained(seed: int, steps: int, *, d_model: int, layers: int) -> T5ForConditionalGeneration:
    """A tiny T5 that has learned the first task a little, in fp32."""
    model = tiny_t5(seed, d_model=d_model, layers=layers)
    model.set_attn_implementation("eager")  # the other one looks at its mask, which vmap does not allow
    train(model, steps, torch_adamw(model, 1e-3), swapped=False, first=10**6 * seed)
    return model


def add_up_in(model: T5ForConditionalGeneration, dtype: Sum) -> None:
    """Have autograd keep `.grad` in this precision."""
    for parameter in model.parameters():
        parameter.grad_dtype = DTYPES[dtype]


def step_batches(index: int, pieces: int) -> list[PairBatch]:
    """The 128 rows of a step as so many micro-batches."""
    parts = [batch(STEP_ROWS // ROWS * index + number, True) for number in range(STEP_ROWS // ROWS)]
    inputs, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    size = STEP_ROWS // pieces
    return [
        PairBatch(ids, torch.ones_like(ids), targets, targets.numel(), np.arange(size), input_padded=False)
        for ids, targets in zip(inputs.split(size), labels.split(size), strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
