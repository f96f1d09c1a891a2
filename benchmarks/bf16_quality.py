"""What rounding to bf16 costs: a tiny T5 fine-tuned with each optimizer, against fp32 throughout.

    python -m benchmarks.bf16_quality [--steps 2500] [--learning-rate 1e-5] [--pretrain-steps 3000]

Task A: write the input backwards. Task B: the same with half of the vocabulary swapped. A model that has learned A in
fp32 is fine-tuned on B from the same weights and rows with: torch's AdamW in fp32 (the reference), our three optimizers
on bf16 weights, and torch's AdamW on bf16 weights (the control: rounding to the nearest). 38 minutes on
a shared core.

A gap is the excess of the validation loss on B over the reference's, as a share of it. JSON on the last line. Exit code
1 when a limit is broken: `adamw_8bit_gap` at most 0.03, and `bf16_adamw_gap` at least 0.5, or the test shows nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.command_line import parse
from jobs.memory_plan import OptimizerName
from jobs.spec import TrainingSpec
from jobs.text.units import format_duration
from worker.training.optimizers.optimizer import make_optimizer

KEYS = (
    "adamw_gap", "adamw_8bit_gap", "adafactor_gap", "bf16_adamw_gap", "steps", "pretrain_steps", "learning_rate",
    "optimizers", "smoke", "start_loss", "table",
)  # fmt: skip
VOCABULARY, LENGTH, ROWS = 256, 12, 32
GAP_LIMIT, CONTROL_LIMIT = 0.03, 0.5
OURS: tuple[OptimizerName, ...] = ("adamw", "adamw_8bit", "adafactor")
Update = Callable[[int, torch.Tensor], object]
"""Takes the number of the step, from 1, and its loss; the gradients are there."""


def main(argv: list[str]) -> int:
    """Pretrain, fine-tune with each, print the table and the JSON line."""
    arguments = parsed(argv)
    torch.set_num_threads(1)
    begun = time.perf_counter()
    pretrained = tiny_t5()
    train(pretrained, arguments.pretrain_steps, torch_adamw(pretrained, 1e-3), swapped=False, first=0)
    start_loss = validation_loss(pretrained, swapped=True)
    took = format_duration(time.perf_counter() - begun)
    print(f"pretrained in {took}; loss on A {validation_loss(pretrained, False):.4f}")
    rows: dict[str, dict[str, float]] = {}
    makers: dict[str, Callable[[T5ForConditionalGeneration, float], Update]] = {
        "fp32": torch_adamw, **{name: ours(name) for name in arguments.optimizers}, "bf16_adamw": torch_adamw
    }  # fmt: skip
    for name, make in makers.items():
        model = copy.deepcopy(pretrained) if name == "fp32" else copy.deepcopy(pretrained).bfloat16()
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        begun = time.perf_counter()
        train(model, arguments.steps, make(model, arguments.learning_rate), swapped=True, first=10**7)
        seconds = time.perf_counter() - begun
        changed = sum(int((weight != before[key]).sum()) for key, weight in model.state_dict().items())
        rows[name] = {
            "loss": validation_loss(model, swapped=True),
            "changed_weights": changed / sum(weight.numel() for weight in before.values()),
            "seconds": round(seconds, 1),
        }
        print(f"{name:12} loss {start_loss:.4f} -> {rows[name]['loss']:.4f}, {format_duration(seconds)}", flush=True)
    reference = rows["fp32"]["loss"]
    gaps = {f"{name}_gap": row["loss"] / reference - 1 for name, row in rows.items() if name != "fp32"}
    found = dict.fromkeys(f"{name}_gap" for name in OURS) | gaps
    print(json.dumps({**found, **vars(arguments), "start_loss": start_loss, "table": rows}))
    good = gaps.get("adamw_8bit_gap", 0.0) <= GAP_LIMIT and gaps["bf16_adamw_gap"] >= CONTROL_LIMIT
    return 0 if good or arguments.smoke else 1


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bf16_quality", description="Quality of bf16 training.")
    parser.add_argument("--steps", type=int, default=2500, help="steps of fine-tuning")
    parser.add_argument("--pretrain-steps", type=int, default=3000)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--optimizers", nargs="+", choices=OURS, default=OURS, help="of ours (default: all)")
    return parse(parser, argv, steps=1, pretrain_steps=1, optimizers=["adamw"])  # adamw_8bit is compiled first


def tiny_t5(seed: int = 0, *, d_model: int = 128, layers: int = 2) -> T5ForConditionalGeneration:
    """FLAN-T5's architecture, without dropout; fp32, the same weights for the same seed."""
    torch.manual_seed(seed)
    config = T5Config(  # type: ignore[call-arg]  # some are of every configuration
        vocab_size=VOCABULARY, d_model=d_model, d_kv=32, d_ff=2 * d_model, num_layers=layers, num_heads=d_model // 32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    # As it comes, an untied head begins at a loss far above that of guessing.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone() * 0.05)
    return model


def batch(index: int, swapped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels, (ROWS, LENGTH) token numbers each: the labels are the inputs backwards."""
    inputs = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(index))
    return inputs, (SWAPPED[inputs] if swapped else inputs).flip(1)


def _swapped() -> torch.Tensor:
    """Token → token: half of them permuted."""
    generator = torch.Generator().manual_seed(7)
    table, half = torch.arange(VOCABULARY), torch.randperm(VOCABULARY - 2, generator=generator)[:128] + 2
    table[half] = half[torch.randperm(128, generator=generator)]
    return table


SWAPPED = _swapped()


def train(model: T5ForConditionalGeneration, steps: int, update: Update, *, swapped: bool, first: int) -> None:
    """So many steps on batches `first` and following."""
    for step in range(1, steps + 1):
        loss = batch_loss(model, first + step, swapped)
        loss.backward()
        update(step, loss.detach())
        model.zero_grad(set_to_none=True)


def batch_loss(model: T5ForConditionalGeneration, index: int, swapped: bool) -> torch.Tensor:
    """Mean negative log likelihood of a token, nats, computed from the logits in fp32."""
    inputs, labels = batch(index, swapped)
    return F.cross_entropy(model(input_ids=inputs, labels=labels).logits.float().flatten(0, 1), labels.flatten())


@torch.no_grad()
def validation_loss(model: T5ForConditionalGeneration, swapped: bool) -> float:
    """Over eight batches that are in no training."""
    return statistics.fmean(batch_loss(model, 10**9 + index, swapped).item() for index in range(8))


def torch_adamw(model: T5ForConditionalGeneration, learning_rate: float) -> Update:
    """torch's own, in the dtype of the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)

    def update(step: int, loss: torch.Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def ours(name: OptimizerName) -> Callable[[T5ForConditionalGeneration, float], Update]:
    """One of the trainer's."""

    def make(model: T5ForConditionalGeneration, learning_rate: float) -> Update:
        optimizer = make_optimizer(name, model.named_parameters(), TrainingSpec(), fused=True)
        return lambda step, loss: optimizer.step(step, learning_rate, loss)

    return make


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
