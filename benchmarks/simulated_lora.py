"""Peaks of LoRA in torch's real allocator against the plan's, on a simulated GPU that counts and computes nothing.

    python -m benchmarks.simulated_lora [--layers N]      # with the module `simgpu`, its libraries in LD_PRELOAD

Qwen2.5-7B with adapters of rank 128 beside all linear layers (on a GPU of 32 GB), and FLAN-T5-XL with rank 16; on a GPU
without native bf16 (`SIMGPU_CC=7.5`) Qwen2.5-7B alone, in fp16 with fp32 adapters. Weights without values, then with
each optimizer forward and backward of every shape and an update, as in the middle of a run.
`--layers`: the same widths with so many layers (of T5, in each stack). `--compiled`: FLAN-T5-XL alone, with compiled
layers and one shape more; what these take above the plan, recomputed, is the same for any number of layers.

| figure | of | limit |
|---|---|---|
| `max_error` | relative error of a planned peak, at most | 0.01; compiled none |
| `over_plan_mib` | what a peak is above the plan, at most | 64 |
| `host_syncs` | waits of the host for the GPU in a micro-batch, at most | 0 |
| `launches` | kernels and products that a micro-batch starts, at most | |
| `qwen_2x2048_gib` | Qwen2.5-7B, 2 × 2,048 tokens, every layer recomputed, adamw_8bit, context included | 20 in bf16 |

JSON on the last line. Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from worker.training.__main__ import set_library_switches

set_library_switches("train")  # before torch is imported

# ruff: noqa: E402
import torch
from transformers import PreTrainedModel

from benchmarks.command_line import parse, skipped
from jobs.memory_plan import OptimizerName
from jobs.spec import LoraMethod, TrainingSpec
from jobs.text.units import GIB, MIB
from worker.training.adapters.lora import Lora
from worker.training.doctor.random_t5 import SHAPES
from worker.training.journal import Journal
from worker.training.machine.device import has_native_bf16
from worker.training.machine.numerics import repeat_shared_heads
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.planning.kernels import bare_model, give_device
from worker.training.planning.ladder import Setting
from worker.training.planning.memory_plan import CONTEXT_BYTES
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.causal.task import Causal
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Task

KEYS = (
    "max_error", "over_plan_mib", "host_syncs", "launches", "qwen_2x2048_gib", "measured", "broken",
)  # fmt: skip
NEEDED = "it needs the simulated GPU: make simulated-gpu, then VENV=.venv-simulated-gpu ../shared/simulated_gpu/run …"
LIMITS = {"max_error": 0.01, "over_plan_mib": 64, "host_syncs": 0, "qwen_2x2048_gib": 20.0}
QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
"""Qwen2.5-7B."""
NAMED = MicroBatchShape(2, 2048, 2048)
PASSES = {
    "qwen": [
        (0, MicroBatchShape(1, 512, 512)), (0, MicroBatchShape(1, 1024, 128)), (2, MicroBatchShape(1, 1536, 1536)),
        (1, NAMED), (1, MicroBatchShape(4, 1024, 1000)),
    ],
    "t5": [
        (0, MicroBatchShape(8, 256, 256)), (0, MicroBatchShape(4, 512, 128)), (1, MicroBatchShape(16, 512, 512)),
    ],
}  # fmt: skip
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw_8bit", "adamw", "adafactor")
GPU, TRAINING = torch.device("cuda"), TrainingSpec()


def is_simulated() -> bool:
    """Whether the GPU here counts what it is asked."""
    return importlib.util.find_spec("simgpu") is not None


def models(layers: int | None) -> dict[str, tuple[Task, dict[str, Any], int]]:
    """Task, config and rank by name."""
    qwen = QWEN_7B if layers is None else QWEN_7B | {"num_hidden_layers": layers}
    t5 = SHAPES["xl"] if layers is None else SHAPES["xl"] | {"num_layers": layers, "num_decoder_layers": layers}
    return {"qwen": (Causal(), qwen, 128)} | ({"t5": (Seq2Seq(), t5, 16)} if has_native_bf16(GPU) else {})


def measure(
    name: str, task: Task, config: dict[str, Any], rank: int, passes: Sequence[tuple[int, MicroBatchShape]], *,
    compiled: bool,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Every shape with every optimizer, where it fits."""
    simgpu = importlib.import_module("simgpu")
    native = has_native_bf16(GPU)
    method = Lora(LoraMethod(type="lora", rank=rank), torch.bfloat16 if native else torch.float16)
    options: dict[str, Any] = {"fused": True, "dropout": None, "method": method}
    predictor = Predictor(config, task=task, device="cuda", training=TRAINING, flash=native, **options)

    def backward(model: PreTrainedModel, shape: MicroBatchShape) -> None:
        batch = task.empty_batch(shape, padded=True, device=torch.device("cpu"))
        (batch.loss_sum(model) / batch.target_tokens).backward()

    for optimizer in OPTIMIZERS:
        # Anew: a model that has recomputed layers keeps an activation more when it does not any longer.
        model = bare_model(config, task, method.dtype, **options)
        give_device(model, GPU)
        if compiled:
            with tempfile.TemporaryDirectory() as folder:
                failure = task.compile(model, Journal(Path(folder) / "journal.jsonl"))
            assert failure is None, failure
        trained = [(key, each) for key, each in model.named_parameters() if each.requires_grad]
        states = make_optimizer(optimizer, trained, TRAINING, fused=True)
        backward(model, MicroBatchShape(1, 32, 32))
        for every, shape in passes:
            if every:
                model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=every)
            else:
                model.activation_checkpointing_disable()
            try:
                backward(model, shape)
                torch.cuda.reset_peak_memory_stats()
                before = simgpu.counts()
                backward(model, shape)
            except torch.OutOfMemoryError as error:
                print(f"{name}, {optimizer}, {shape}: {str(error).splitlines()[0]}")
                gc.collect()
                torch.cuda.empty_cache()
                continue
            peak, now = torch.cuda.max_memory_allocated(), simgpu.counts()
            planned = predictor.predict(shape, Setting(every, optimizer)).pass_peak
            yield {
                "model": name, "optimizer": optimizer, "activation_checkpointing": every,
                "shape": [shape.rows, shape.input_width, shape.target_width],
                "peak_gib": round(peak / GIB, 3), "plan_gib": round(planned / GIB, 3), "error": planned / peak - 1,
                "over_plan_mib": round((peak - planned) / MIB, 1),
                "host_syncs": now["syncs"] - before["syncs"],
                "launches": sum(now[kind] - before[kind] for kind in ("launches", "gemms")),
            }  # fmt: skip
        del model, trained, states
        gc.collect()
        torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--compiled", action="store_true")
    arguments = parse(parser, argv, layers=1)
    if not is_simulated():
        return skipped(arguments, NEEDED)
    found = []
    if not has_native_bf16(GPU):
        repeat_shared_heads()
    chosen = models(arguments.layers)
    if arguments.compiled:
        del chosen["qwen"]
    for name, (task, config, rank) in chosen.items():
        passes = PASSES[name] + ([(1, MicroBatchShape(4, 512, 128))] if arguments.compiled else [])
        for figures in measure(name, task, config, rank, passes, compiled=arguments.compiled):
            found.append(figures)
            print(figures, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    named = [NAMED.rows, NAMED.input_width, NAMED.target_width]
    result: dict[str, Any] = {
        "max_error": max(abs(each["error"]) for each in found),
        "over_plan_mib": max(each["over_plan_mib"] for each in found),
        "host_syncs": max(each["host_syncs"] for each in found),
        "launches": max(each["launches"] for each in found),
        "qwen_2x2048_gib": max(
            (
                round(each["peak_gib"] + CONTEXT_BYTES / GIB, 2)
                for each in found
                if (each["shape"], each["optimizer"]) == (named, "adamw_8bit")
            ),
            default=0.0,
        ),
        "measured": found,
    }
    limits = LIMITS if has_native_bf16(GPU) else {**LIMITS, "qwen_2x2048_gib": math.inf}
    if arguments.compiled:
        limits = {**limits, "max_error": math.inf}
    result["broken"] = [name for name, limit in limits.items() if result[name] > limit]
    print(json.dumps(result))
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
