"""Steps of a job, one at a time by the trainer's own loop: how long they take, what they hold, whether they wait."""

from __future__ import annotations

import dataclasses
import gc
import time
import warnings
from collections.abc import Mapping
from typing import cast

import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from worker.training.context import TrainingContext
from worker.training.loop import steps
from worker.training.memory import hard_limit
from worker.training.optimizers.gradients import gradient_norm
from worker.training.optimizers.optimizer import Optimizer
from worker.training.planning.alternatives import Alternatives
from worker.training.planning.ladder import Setting
from worker.training.steps.result import StepResult

SAMPLE = 4096
"""Numbers of each gradient that are compared."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """Some steps, one after the other."""

    count: int
    rows: int
    flops: float
    """What the model needs for them."""
    seconds: float
    allocated: int
    """Bytes of torch's allocator at their peak."""
    waits: int
    """Of the host for the GPU."""
    graphs: int
    """Compiled while they ran."""
    planned: Mapping[str, int]
    """Bytes by category that were predicted for the largest of their micro-batches."""


class Stepping:
    """A job that takes a step when it is asked to."""

    def __init__(self, context: TrainingContext, device: torch.device) -> None:
        self.context, self.device = context, device
        self._results = steps(context)

    def step(self) -> StepResult:
        """One more."""
        result = next(self._results)
        self.context.state.step, self.context.state.safe = result.step, dict(result.safe)
        return result

    def measure(self, count: int) -> Steps:
        """So many more."""
        context, cuda, graphs = self.context, self.device.type == "cuda", counters["stats"]["unique_graphs"]
        wait_for(self.device)
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if cuda:
                torch.cuda.set_sync_debug_mode("warn")
            told.clear()  # it says of itself that it is a prototype
            begun = time.perf_counter()
            try:
                results = [self.step() for _ in range(count)]
            finally:
                if cuda:
                    torch.cuda.set_sync_debug_mode("default")
        wait_for(self.device)
        seconds = time.perf_counter() - begun
        context.optimizer.raise_if_nonfinite()
        memory = context.plan.memory
        assert memory is not None, "it was planned"
        alternatives = Alternatives(context.spec, context.plan, self.device)
        largest = max((result.largest for result in results), key=lambda shape: shape.tokens)
        return Steps(
            count=count,
            rows=sum(result.rows for result in results),
            flops=sum(result.flops for result in results),
            seconds=seconds,
            allocated=torch.cuda.max_memory_allocated(self.device) if cuda else 0,
            waits=sum("synchronizing CUDA operation" in str(each.message) for each in told),
            graphs=counters["stats"]["unique_graphs"] - graphs,
            planned=alternatives.parts(largest, Setting(memory.activation_checkpointing, memory.optimizer)),
        )


class RecordingOptimizer:
    """Takes samples of the gradients, and updates nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.sample: torch.Tensor | None = None

    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """See `Optimizer.step`."""
        grads = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        self.sample = torch.cat([grad.flatten()[:SAMPLE].double().cpu() for grad in grads])
        return gradient_norm(self._model.parameters())


def sample_gradient(context: TrainingContext, device: torch.device, limit: int | None) -> torch.Tensor:
    """`SAMPLE` numbers of each gradient of the next step, which is not made; with at most `limit` bytes of the GPU."""
    recorder = RecordingOptimizer(context.loaded.model)
    trial = dataclasses.replace(context, optimizer=cast(Optimizer, recorder))  # of which a step asks no more
    gc.collect()
    context.cache.clear()
    trial.state.step, trial.state.safe = context.state.step, {}
    with hard_limit.on_gpu(device, limit):
        next(steps(trial))
    assert recorder.sample is not None
    return recorder.sample


def wait_for(device: torch.device) -> None:
    """For a GPU, until it has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
