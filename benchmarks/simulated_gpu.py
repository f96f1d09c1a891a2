"""FLAN-T5-XL's peaks in torch's real allocator against the plan's, on a simulated GPU that counts and computes nothing.

    python -m benchmarks.simulated_gpu [--model xl]      # with the module `simgpu`, its libraries in LD_PRELOAD

A random checkpoint is loaded as a job loads it. With each optimizer the model takes micro-batches of every shape,
padded and not, is evaluated, updated, and copied as for a checkpoint, as in the middle of a run: eager, then with
compiled layers. What does not fit on the GPU is left out, and printed.

| figure | of | limit |
|---|---|---|
| `load_peak_ratio` | memory at the peak of loading / of the weights | 1.05 |
| `max_error` | relative error of a planned peak, eager layers, at most | 0.01 |
| `over_plan_mib` | what the allocator held at most above the plan (0: never above) | |
| `compiled_over_plan` | the same of compiled layers, relative to the plan | 0.005 |
| `compiled_under_plan` | what compiled layers leave unused of the plan, at most, relative to it | |
| `graphs_after_warmup` | graphs compiled after the warm-up | 0 |
| `host_syncs_per_step` | waits of the host for the GPU in a micro-batch and an update, at most | 1 |
| `launches_per_micro_batch` | kernels and products that a micro-batch starts, at most | |
| `pinned_ratio` | host memory pinned for copies of a checkpoint / bytes of the copies, at most | 1.01 |

JSON on the last line. Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from worker.training.__main__ import set_library_switches

set_library_switches("train")  # before torch is imported

# ruff: noqa: E402
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from benchmarks.command_line import parse, skipped
from benchmarks.gpu_bench import compile_layers
from benchmarks.simulated_lora import NEEDED, is_simulated
from jobs.memory_plan import OptimizerName
from jobs.spec import TrainingSpec
from jobs.text.units import GIB, MIB
from worker.training.adapters.method import weights_of
from worker.training.checkpoints.checkpoint import OPTIMIZER, WEIGHTS
from worker.training.checkpoints.saving import copy_tensors, make_buffers
from worker.training.doctor.random_t5 import SHAPES, write_checkpoint
from worker.training.machine.host import host_memory
from worker.training.network.model import load
from worker.training.optimizers.adamw_offload import STATE_BYTES
from worker.training.optimizers.gradients import finite_clipping
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.planning.ladder import Prediction, Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.seq2seq.task import Seq2Seq

KEYS = (
    "load_peak_ratio", "max_error", "over_plan_mib", "compiled_over_plan", "compiled_under_plan", "graphs",
    "graphs_after_warmup", "host_syncs_per_step", "launches_per_micro_batch", "pinned_ratio", "measured", "broken",
)  # fmt: skip
LIMITS = {
    "load_peak_ratio": 1.05,
    "max_error": 0.01,
    "compiled_over_plan": 0.005,
    "graphs_after_warmup": 0,
    "host_syncs_per_step": 1,
    "pinned_ratio": 1.01,
}
DROPOUT = 0.1
LARGEST = MicroBatchShape(6, 512, 512)
MICRO_BATCHES = [
    MicroBatchShape(1, 256, 256),
    MicroBatchShape(4, 128, 256),
    MicroBatchShape(8, 256, 256),
    MicroBatchShape(11, 256, 256),
    LARGEST,
]
GPU, TASK, TRAINING = torch.device("cuda"), Seq2Seq(), TrainingSpec()
Figures = dict[str, Any]


def loss_sum(model: PreTrainedModel, shape: MicroBatchShape, *, padded: bool) -> torch.Tensor:
    """Of one micro-batch, made on the host."""
    batch = TASK.empty_batch(shape, padded=padded, device=torch.device("cpu"))
    return batch.loss_sum(model) / batch.target_tokens


class Measurement:
    """One model, and what it takes under one optimizer after the other."""

    def __init__(self, model: PreTrainedModel, config: dict[str, Any]) -> None:
        self._model = model
        predictor = Predictor(config, task=TASK, device="cuda", fused=True, dropout=DROPOUT, training=TRAINING)
        self._simgpu = importlib.import_module("simgpu")

        @functools.cache
        def planned(shape: MicroBatchShape, optimizer: OptimizerName, padded: bool) -> Prediction:
            return predictor.predict(shape, Setting(0, optimizer), padded=padded)

        self._planned = planned

    def optimizer(self, name: OptimizerName) -> Optimizer:
        """With gradients and states, as after a first step."""
        optimizer = make_optimizer(name, self._model.named_parameters(), TRAINING, fused=True)
        loss_sum(self._model, MicroBatchShape(1, 32, 32), padded=True).backward()
        return optimizer

    def passes(self, name: OptimizerName) -> Iterator[Figures]:
        """Forward and backward, of every shape; after each once more, as in a run that has had it."""
        for shape in MICRO_BATCHES:
            for padded in (True, False):
                text = f"{shape.rows} x {shape.input_width}/{shape.target_width}, {'' if padded else 'not '}padded"
                try:
                    loss_sum(self._model, shape, padded=padded).backward()
                    before = self._begin()
                    loss_sum(self._model, shape, padded=padded).backward()
                except torch.OutOfMemoryError as error:
                    print(f"{name}, {text}: {str(error).splitlines()[0]}")
                    release()
                    continue
                yield self._end(text, self._planned(shape, name, padded).pass_peak, before)

    def evaluation(self, name: OptimizerName) -> Figures:
        """A loss without gradients, of the largest shape."""
        before = self._begin()
        with torch.no_grad():
            loss_sum(self._model, LARGEST, padded=True)
        return self._end("evaluation", self._planned(LARGEST, name, True).pass_peak, before)

    def update(self, name: OptimizerName, optimizer: Optimizer) -> Figures:
        """The second one: the first compiles what it can."""
        # What is read from the GPU is 0, and so would be whether all is finite. `adamw` reads nothing.
        module = importlib.import_module(type(optimizer).__module__)

        def all_finite(*arguments: Any) -> float:
            with mock.patch.object(torch.Tensor, "tolist", lambda read: (torch.Tensor.cpu(read), (1, 1.0))[1]):
                return finite_clipping(*arguments)

        with mock.patch.object(module, "finite_clipping", all_finite, create=True):
            for number in (1, 2):
                before = self._begin()
                optimizer.step(number, 1e-4, torch.zeros((), dtype=torch.float32, device=GPU))
        return self._end("update", self._planned(MICRO_BATCHES[0], name, True).update_peak, before)

    def checkpoint(self, name: OptimizerName, optimizer: Optimizer) -> Figures:
        """Copies of weights and states on the host. `pinned_ratio`: pinned bytes / their bytes."""
        before, pinned = self._begin(), self._simgpu.pinned()
        live = {WEIGHTS: weights_of(self._model), OPTIMIZER: optimizer.state_dict()}
        buffers = make_buffers(live)
        assert buffers is not None, "there is no limit on what may be pinned"
        copy_tensors(live, buffers)
        size = sum(tensor.nbytes for named in live.values() for tensor in named.values())
        figures = self._end("checkpoint", self._planned(LARGEST, name, True).pass_peak, before)
        return figures | {"copies_gib": round(size / GIB, 3), "pinned_ratio": (self._simgpu.pinned() - pinned) / size}

    def _begin(self) -> dict[str, int]:
        torch.cuda.reset_peak_memory_stats()
        counts: dict[str, int] = self._simgpu.counts()
        return counts

    def _end(self, what: str, plan: int, before: dict[str, int]) -> Figures:
        peak, now = torch.cuda.max_memory_allocated(), self._simgpu.counts()
        return {
            "what": what,
            "peak_gib": round(peak / GIB, 3),
            "plan_gib": round(plan / GIB, 3),
            "over_plan_mib": round((peak - plan) / MIB, 1),
            "over_plan": round(peak / plan - 1, 5),
            "host_syncs": now["syncs"] - before["syncs"],
            "launches": sum(now[kind] - before[kind] for kind in ("launches", "gemms")),
        }


def release() -> None:
    """Give back what nothing refers to."""
    gc.collect()
    torch.cuda.empty_cache()


def measure(measurement: Measurement, name: OptimizerName, *, compiled: bool) -> Iterator[Figures]:
    """Everything with one optimizer, or nothing where it does not fit."""
    try:
        optimizer = measurement.optimizer(name)
    except torch.OutOfMemoryError as error:
        print(f"{name}: {str(error).splitlines()[0]}")
        return
    yield from measurement.passes(name)
    if not compiled:  # the others do not take the layers' compiled way
        yield measurement.evaluation(name)
        yield measurement.update(name, optimizer)
        if name != "adamw_offload":  # its states are on the host already
            yield measurement.checkpoint(name, optimizer)


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SHAPES), default="xl")
    arguments = parse(parser, argv, model="xl-width")
    if not is_simulated():
        return skipped(arguments, NEEDED)
    config = SHAPES[arguments.model]
    with tempfile.TemporaryDirectory(prefix="longhaul-simulated-gpu-") as home:
        write_checkpoint(folder := Path(home) / "model", config)
        loaded = load(folder, GPU, task=TASK, dropout=DROPOUT, fused=True, activation_checkpointing=0)
    loaded.model.train()
    measurement = Measurement(loaded.model, config)
    found: dict[bool, list[Figures]] = {False: [], True: []}
    graphs = compiled_before = 0
    for compiled in found:
        if compiled:
            loaded.model.zero_grad(set_to_none=True)
            release()
            compiled_before = counters["stats"]["unique_graphs"]
            blocks = compile_layers(loaded.model, "inductor")
            assert blocks.failure is None, blocks.failure
            graphs = counters["stats"]["unique_graphs"]
        for name in get_args(OptimizerName):
            if name == "adamw_offload" and STATE_BYTES * loaded.parameters + GIB > host_memory().available:
                print(f"{name}: the host has no room for its states")
                continue
            for figures in measure(measurement, name, compiled=compiled):
                found[compiled].append({"optimizer": name, "compiled": compiled, **figures})
                print(found[compiled][-1], flush=True)
            loaded.model.zero_grad(set_to_none=True)
            release()
    exact = [each for each in found[False] if each["what"] not in ("evaluation", "checkpoint")]
    passes = [each for each in exact + found[True] if each["what"] != "update"]
    # The host makes the update of `adamw_offload`, and waits for the GPU again and again.
    updates = [each for each in exact if each["what"] == "update" and each["optimizer"] != "adamw_offload"]
    result = {
        "load_peak_ratio": round(loaded.peak_ratio, 4),
        "max_error": max(abs(each["over_plan"]) for each in exact),
        "over_plan_mib": max(0, *(each["over_plan_mib"] for each in found[False])),
        "compiled_over_plan": max(0, *(each["over_plan"] for each in found[True])),
        "compiled_under_plan": -min(each["over_plan"] for each in found[True]),
        "graphs": graphs - compiled_before,
        "graphs_after_warmup": counters["stats"]["unique_graphs"] - graphs,
        "host_syncs_per_step": sum(max(each["host_syncs"] for each in some) for some in (passes, updates)),
        "launches_per_micro_batch": max(each["launches"] for each in passes),
        "pinned_ratio": round(max(each.get("pinned_ratio", 0) for each in found[False]), 4),
        "measured": found[False] + found[True],
    }
    result["broken"] = [name for name, limit in LIMITS.items() if result[name] > limit]
    print(json.dumps(result))
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
