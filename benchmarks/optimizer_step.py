"""One step of an optimizer on a model as wide as FLAN-T5-XL, with as few layers as this machine has room for.

    python -m benchmarks.optimizer_step [--optimizer adamw_8bit] [--layers 1]

Random bf16 weights, forward and backward over two short rows, then the update. What is measured: seconds to compile
(from an empty cache, if TORCHINDUCTOR_CACHE_DIR names an empty folder), seconds of each update, bytes of state a
weight, and by how much the resident set rises above what it was before the update. JSON on the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.command_line import parse
from jobs.spec import TrainingSpec
from worker.training.journal import Journal
from worker.training.machine.usage import process_bytes
from worker.training.optimizers.optimizer import make_optimizer

KEYS = (
    "optimizer", "parameters", "weight_bytes", "state_bytes_per_weight", "compile_s", "first_step_s", "step_s",
    "step_peak_rise_bytes", "resident_before_step_bytes", "loss", "threads",
)  # fmt: skip
STEPS = 4


def main(argv: list[str]) -> int:
    """Measure, and print the JSON line."""
    arguments = parsed(argv)
    model = wide_t5(arguments.layers, arguments.width)
    weights = sum(parameter.numel() for parameter in model.parameters())
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer = make_optimizer(arguments.optimizer, model.named_parameters(), TrainingSpec(), fused=True)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        optimizer.compile(Journal(Path(folder) / "journal.jsonl"))
    compile_s = time.perf_counter() - begun
    seconds, rises = [], []
    for step in range(1, STEPS + 1):
        loss = model(input_ids=torch.randint(2, 32000, (2, 16)), labels=torch.randint(2, 32000, (2, 16))).loss
        loss.backward()
        before = reset_peak()
        begun = time.perf_counter()
        optimizer.step(step, 1e-5, loss.detach())
        seconds.append(time.perf_counter() - begun)
        rises.append(process_bytes("VmHWM") - before)
        model.zero_grad(set_to_none=True)
    state_bytes = sum(state.nbytes for state in optimizer.state_dict().values())
    result = {
        "optimizer": arguments.optimizer,
        "parameters": weights,
        "weight_bytes": weight_bytes,
        "state_bytes_per_weight": round(state_bytes / weights, 3),
        "compile_s": round(compile_s, 1),
        "first_step_s": round(seconds[0], 2),
        "step_s": round(statistics.median(seconds[1:]), 2),
        "step_peak_rise_bytes": max(rises),
        "resident_before_step_bytes": before,
        "loss": loss.item(),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))
    return 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizer_step", description="One wide optimizer step.")
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit", "adafactor"), default="adamw_8bit")
    parser.add_argument("--layers", type=int, default=1, help="layers of encoder and of decoder")
    parser.add_argument("--width", type=int, default=2048)
    return parse(parser, argv, optimizer="adamw", width=64)


def wide_t5(layers: int, width: int) -> T5ForConditionalGeneration:
    """Of FLAN-T5-XL's shape (2,048 wide), random bf16 weights, the head untied."""
    torch.manual_seed(0)
    config = T5Config(  # type: ignore[call-arg]  # some are of every configuration
        vocab_size=32128, d_model=width, d_kv=64, d_ff=width * 5 // 2, num_layers=layers, num_heads=width // 64,
        dropout_rate=0.0, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    # transformers ties the head of every T5 that it makes; and as it comes, it begins far above the loss of guessing.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.02)
    return model.bfloat16()


def reset_peak() -> int:
    """Begin a new peak of the resident set; returns what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return process_bytes("VmRSS")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
