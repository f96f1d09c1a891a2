"""FLAN-T5-XL's peaks in torch's real allocator against the plan's, on a simulated GPU that counts and computes nothing.

    python -m benchmarks.simulated_gpu [--model xl]      # with the module `simgpu`, its libraries in LD_PRELOAD

Each optimizer, eager: a model with random weights takes micro-batches of every shape, padded and not, and an update, as
in the middle of a run. `max_error`: the largest relative error of a peak, of passes and of updates; `over_plan_mib`:
what the allocator held at most above the plan (0: never above). `host_syncs`: waits of the host for the GPU in a
micro-batch, at most; `launches`: kernels and products that a micro-batch starts, at most.

JSON on the last line. Exit code 1 when a limit is broken: `max_error` 0.01, `host_syncs` 0.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import sys
from typing import Any, get_args
from unittest import mock

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the trainer does

import torch
from transformers import PreTrainedModel

from benchmarks.gpu_ladder import make_model
from benchmarks.random_t5 import SHAPES
from jobs.memory_plan import OptimizerName
from jobs.spec import TrainingSpec
from jobs.text.units import GIB, MIB
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.planning.prediction import Prediction, Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.seq2seq.fused import fuse, set_dropout
from worker.training.tasks.seq2seq.task import Seq2Seq

ERROR_LIMIT = 0.01
DROPOUT = 0.1
MICRO_BATCHES = [
    MicroBatchShape(1, 256, 256),
    MicroBatchShape(4, 128, 256),
    MicroBatchShape(8, 256, 256),
    MicroBatchShape(6, 512, 512),
]
GPU, TASK = torch.device("cuda"), Seq2Seq()


def take(model: PreTrainedModel, shape: MicroBatchShape, *, padded: bool) -> None:
    """One micro-batch, forward and backward."""
    batch = TASK.empty_batch(shape, padded=padded, device=torch.device("cpu"))
    (batch.loss_sum(model) / batch.target_tokens).backward()


def measure(config: dict[str, Any], name: OptimizerName, simgpu: Any) -> list[dict[str, Any]]:
    """Every shape and the update with one optimizer. Shapes that do not fit on the GPU are left out, and printed."""
    training = TrainingSpec()
    model = make_model(config, GPU)
    set_dropout(model, DROPOUT)
    fuse(model)
    predictor = Predictor(config, task=TASK, device="cuda", fused=True, dropout=DROPOUT, training=training)
    optimizer = make_optimizer(name, model.named_parameters(), training, fused=True)
    take(model, MicroBatchShape(1, 32, 32), padded=True)  # gradients and workspaces are there from now on
    found: list[dict[str, Any]] = []

    def add(what: str, plan: int, before: dict[str, int]) -> None:
        peak, now = torch.cuda.max_memory_allocated(), simgpu.counts()
        found.append(
            {
                "optimizer": name,
                "what": what,
                "peak_gib": round(peak / GIB, 3),
                "plan_gib": round(plan / GIB, 3),
                "over_plan_mib": round((peak - plan) / MIB, 1),
                "error": round(abs(peak / plan - 1), 5),
                "host_syncs": now["syncs"] - before["syncs"],
                "launches": sum(now[kind] - before[kind] for kind in ("launches", "gemms")),
            }
        )
        print(found[-1], flush=True)

    def planned(shape: MicroBatchShape, padded: bool) -> Prediction:
        return predictor.predict(shape, Setting(0, name), padded=padded)

    for shape in MICRO_BATCHES:
        for padded in (True, False):
            try:
                take(model, shape, padded=padded)
                torch.cuda.reset_peak_memory_stats()
                before = simgpu.counts()
                take(model, shape, padded=padded)
            except torch.cuda.OutOfMemoryError as error:
                print(f"{name}, {shape}: {str(error).splitlines()[0]}")
                gc.collect()
                torch.cuda.empty_cache()
                continue
            add(f"{shape.rows} x {shape.input_width}/{shape.target_width}, padded {padded}",
                planned(shape, padded).pass_peak, before)  # fmt: skip
    # What is read from the GPU is 0, and so would be whether all is finite. `adamw` reads nothing.
    module = importlib.import_module(type(optimizer).__module__)
    with mock.patch.object(module, "finite_clipping", create=True, return_value=1.0):
        for number in (1, 2):  # the first one compiles what it can
            torch.cuda.reset_peak_memory_stats()
            before = simgpu.counts()
            optimizer.step(number, 1e-4, torch.zeros((), dtype=torch.float32, device=GPU))
    add("update", planned(MICRO_BATCHES[0], True).update_peak, before)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="xl")
    options = parser.parse_args()
    simgpu = importlib.import_module("simgpu")
    found: list[dict[str, Any]] = []
    for name in get_args(OptimizerName):
        try:
            found += measure(SHAPES[options.model], name, simgpu)
        except torch.cuda.OutOfMemoryError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
        gc.collect()
        torch.cuda.empty_cache()
    passes = [each for each in found if each["what"] != "update"]
    result = {
        "max_error": max(each["error"] for each in found),
        "over_plan_mib": max(0, *(each["over_plan_mib"] for each in found)),
        "host_syncs": max(each["host_syncs"] for each in passes),
        "launches": max(each["launches"] for each in passes),
        "measured": found,
    }
    print(json.dumps(result))
    return int(result["max_error"] > ERROR_LIMIT or result["host_syncs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
