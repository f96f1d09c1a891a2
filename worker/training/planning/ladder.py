"""The ladder: of all settings that fit, the best by speed and quality.

A candidate is an optimizer, how many layers are recomputed, and the largest micro-batch that then fits. Its score is
its speed relative to the fastest candidate, times the worth of its optimizer (`WORTH`). Explicit settings of the job
(`Fixed`) are never changed.

Tracing a candidate takes seconds for a large model. So candidates are tried in order of the best score that they could
have, until none that is left could win; one whose weights, gradients and states alone do not fit is not traced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import nn

from jobs.gpus import REFERENCE, GpuFacts
from jobs.memory_plan import Candidate, OptimizerName
from jobs.plan import EXPECTED_SHARE
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.task import Config, Flops, Task

# -- prediction --------------------------------------------------------------------------------------------------------
# The types of a prediction: a micro-batch's shape and a setting give the peak memory of one training step.


@dataclass(frozen=True)
class Setting:
    """What can be chosen besides the micro-batch."""

    activation_checkpointing: int
    """Every n-th layer is recomputed in the backward pass; 0: none."""
    optimizer: OptimizerName


@dataclass(frozen=True)
class ModelSize:
    """Weights of a model; shared ones count once."""

    parameter_bytes: int
    trained: int
    """Numbers that are trained."""
    trained_bytes: int
    """Theirs; as many again for their gradients."""
    master_bytes: int
    """Of an fp32 copy of those that are trained and have fewer bits."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """`requires_grad` says what is trained."""
        every = list(model.parameters())
        trained = [each for each in every if each.requires_grad]
        return cls(
            parameter_bytes=sum(each.nbytes for each in every),
            trained=sum(each.numel() for each in trained),
            trained_bytes=sum(each.nbytes for each in trained),
            master_bytes=sum(4 * each.numel() for each in trained if each.dtype.itemsize < 4),
        )


@dataclass(frozen=True)
class Prediction:
    """Bytes on the device."""

    parts: dict[str, int]
    """At the peak: `weights`, `gradients`, `optimizer`, `activations` (batch included), `temporaries`."""
    peak: int
    """Highest in the whole step and in an evaluation: the sum of the parts."""
    pass_peak: int
    """Highest during forward and backward pass."""
    evaluation_peak: int
    """Highest while a micro-batch of the same shape is evaluated, between two steps."""
    update_peak: int
    """Highest during the optimizer's step."""
    activations_after_forward: int
    """What the forward pass leaves for the backward pass, batch included."""


# -- row time ----------------------------------------------------------------------------------------------------------
# How long a row takes, as far as the ladder's choice depends on it: calculated, not measured.

LAUNCHES = 66
"""Kernels that a micro-batch starts for each layer: 3,155 for the 48 of FLAN-T5-XL (docs/measurements.md)."""
LAUNCH_S = 6e-6
"""Seconds of one launch by Python ahead of the GPU: a typical figure, not measured here."""


@dataclass(frozen=True)
class RowTime:
    """Seconds of rows of one shape, the longest there is. The optimizer's step is not in it, where the GPU makes it.

    Arithmetic: FLOPs of the longest shape at `EXPECTED_SHARE` of the GPU's peak, recomputation counted as work. Each
    micro-batch besides: its weights are read twice, and the gradients of those that are trained read and written once,
    at the bandwidth of the GPU's memory, and its kernels are launched. An unknown GPU and a CPU count as the reference
    GPU: it is only the ratios that count.
    """

    task: Task
    config: Config
    flops: Flops
    """Of training the model."""
    inputs: int
    targets: int
    size: ModelSize
    gpu: GpuFacts | None
    batch: int
    """Rows of an optimizer step."""

    def update_s(self, optimizer: OptimizerName) -> float:
        """Seconds of an update by the host, for which the GPU waits; 0 where the GPU makes it."""
        if self.gpu is None or optimizer != "adamw_offload" or not self.size.trained:
            return 0.0
        return self.gpu.offloaded_update_s(self.size.trained, self.size.trained_bytes // self.size.trained)

    def seconds(self, rows: int, activation_checkpointing: int, optimizer: OptimizerName) -> float:
        """Seconds of one row in micro-batches of this many rows."""
        shape = np.array([self.inputs]), np.array([self.targets])
        flops = self.flops.rows(*shape)
        if activation_checkpointing:
            flops += self.task.recomputed_flops(self.config, activation_checkpointing).forward(*shape)
        gpu, size = self.gpu or REFERENCE, self.size
        peak, bandwidth = gpu.peak_flops or REFERENCE.peak_flops, gpu.memory_bandwidth or REFERENCE.memory_bandwidth
        assert peak and bandwidth, "the reference GPU is known"
        traffic = 2 * (size.parameter_bytes + size.trained_bytes)
        launches = LAUNCHES * self.task.layers(self.config)
        seconds = flops / (EXPECTED_SHARE * peak) + (traffic / bandwidth + launches * LAUNCH_S) / rows
        return seconds + self.update_s(optimizer) / self.batch


# -- row search --------------------------------------------------------------------------------------------------------
# The most rows whose predicted peak is within a limit: which number to predict next, so that few are needed.


def next_rows(
    fits: Mapping[int, Prediction], too_many: tuple[int, int] | None, limit_bytes: int, cap: int
) -> int | None:
    """How many rows to trace next: more than are known to fit, fewer than are known not to; None if that is decided.

    `too_many`: rows, and their peak.
    """
    best = max(fits)
    if best >= cap or (too_many is not None and too_many[0] == best + 1):
        return None
    room = limit_bytes - fits[best].peak
    fewer = max((rows for rows in fits if rows < best), default=None)
    # Any second point will do; all rows at once where they fit even if everything grew with them.
    guess: float = cap - best if fits[best].peak * cap <= best * limit_bytes else 8 - best
    if fewer is not None:
        less, more = fits[fewer], fits[best]
        # One row more needs its activations at least: not worth a trace where these alone are clearly too much.
        both = (
            more.parts["activations"] / best,
            (more.parts["activations"] - less.parts["activations"]) / (best - fewer),
        )
        if room < 0.9 * min(both):
            return None
        slope = (more.peak - less.peak) / (best - fewer)
        guess = room / slope if slope > 0 else math.inf
    if too_many is not None:
        guess = room * (too_many[0] - best) / (too_many[1] - fits[best].peak)
    most = cap if too_many is None else too_many[0] - 1
    return int(min(most, best + max(1, guess)))


# -- ladder ------------------------------------------------------------------------------------------------------------

WORTH: dict[OptimizerName, float] = {"adamw": 1.0, "adamw_offload": 1.0, "adamw_8bit": 0.95, "adafactor": 0.6}
"""What an optimizer's quality is worth in speed. In docs/bf16.md `adamw_8bit` ends 0.3 % above `adamw` in loss;
Adafactor was no worse there, but has no momentum, and is known to need other learning rates than people usually set."""
STATE_BYTES: dict[OptimizerName, int] = {"adamw": 8, "adamw_offload": 0, "adamw_8bit": 2, "adafactor": 0}
"""A trained weight on the GPU, at the least, without the master copy that `adamw` keeps of those in bf16."""
RECOMPUTE = (0, 4, 3, 2, 1)
"""Every n-th layer; from the fastest to the smallest."""
SMALLEST: OptimizerName = "adafactor"
"""The optimizer whose states are the smallest."""
_FEW = 8
"""At most this many rows are likely to fit: tried first."""


class Predicts(Protocol):
    """What the ladder needs from `predictor.Predictor`."""

    @property
    def size(self) -> ModelSize:
        """Of the model."""

    def predict(self, shape: MicroBatchShape, setting: Setting, *, padded: bool = True) -> Prediction:
        """The peak of a step with micro-batches of this shape."""

    def most_rows(
        self, inputs: int, targets: int, setting: Setting, limit_bytes: int, cap: int
    ) -> tuple[int, Prediction]:
        """The most rows, up to `cap`, that fit, and their prediction; 0 and that of one row if not even one fits."""


@dataclass(frozen=True)
class Fixed:
    """What the job sets itself; None: auto."""

    optimizer: OptimizerName | None = None
    activation_checkpointing: int | None = None
    micro_batch: int | None = None
    begun: bool = False
    """The run began with this optimizer: it can no longer change."""
    evaluation: bool = False
    """Nothing is trained: there are rows alone to choose."""

    @property
    def keys(self) -> list[str]:
        """Names of the settings that the job fixes but could change, as in its `memory`."""
        names = ["optimizer", "activation_checkpointing", "micro_batch"]
        names = names[2:] if self.evaluation else names[1:] if self.begun else names
        return [name for name in names if getattr(self, name) is not None]

    def without(self, *keys: str) -> Fixed:
        """The same, with these settings left to the ladder."""
        left: dict[str, Any] = dict.fromkeys(keys)
        return replace(self, **left)


class Ladder:
    """All ways to train one model in one shape within one limit. Nothing is traced twice."""

    def __init__(
        self,
        predictor: Predicts,
        time: RowTime,
        *,
        limit: int,
        context: int,
        cap: int,
        offload: bool = False,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """`limit`: bytes that a peak may reach, `context` among them, which no prediction holds.

        `cap`: the most rows that are tried. `offload`: the host has room for optimizer states, where `adamw_offload`
        keeps them. `progress` is called before each trace.
        """
        self._predictor = predictor
        self._time = time
        self._limit = limit
        self._context = context
        self._cap = cap
        self._progress = progress
        self._fastest = time.seconds(cap, 0, SMALLEST)
        self._optimizers = [each for each in WORTH if offload or each != "adamw_offload"]
        self._seen: dict[tuple[OptimizerName, int, int | None], Candidate] = {}

    def walk(self, fixed: Fixed) -> list[Candidate]:
        """The examined candidates, the best first. The first that fits is chosen; if none fits, nothing is."""
        looked_at: list[Candidate] = []
        best = 0.0
        for bound, optimizer, activation_checkpointing in self._ways(fixed):
            if bound <= best:
                break
            if any(each.optimizer == optimizer and not each.parts for each in looked_at):
                continue  # recomputation makes nothing of that smaller
            found = self._examine(optimizer, activation_checkpointing, fixed.micro_batch)
            looked_at.append(found)
            if found.fits:
                best = max(best, found.score)
        return sorted(looked_at, key=_rank)

    def nearest(self, fixed: Fixed) -> tuple[tuple[str, ...], Candidate] | None:
        """The best candidate that fits with the fewest settings left to the ladder, and their names."""
        for count in range(1, len(fixed.keys) + 1):
            ways = [
                (freed, found)
                for freed in itertools.combinations(fixed.keys, count)
                if (found := choice(self.walk(fixed.without(*freed)))) is not None
            ]
            if ways:
                return min(ways, key=lambda way: _rank(way[1]))
        return None

    def smallest(self, fixed: Fixed) -> Candidate:
        """The candidate with the lowest peak: one row, all layers recomputed, no states, as far as the job allows."""
        optimizer = fixed.optimizer or SMALLEST
        activation_checkpointing = 1 if fixed.activation_checkpointing is None else fixed.activation_checkpointing
        self._progress()
        rows = fixed.micro_batch or 1
        prediction = self._predictor.predict(self._shape(rows), Setting(activation_checkpointing, optimizer))
        return self._candidate(optimizer, activation_checkpointing, rows, rows, prediction.parts)

    def _ways(self, fixed: Fixed) -> Iterator[tuple[float, OptimizerName, int]]:
        """(the best score that it could have, optimizer, activation_checkpointing), in the order to look at them."""
        optimizers = [fixed.optimizer] if fixed.optimizer else self._optimizers
        recompute = RECOMPUTE if fixed.activation_checkpointing is None else (fixed.activation_checkpointing,)
        rows = fixed.micro_batch or self._cap
        ways = [
            (self._score(optimizer, every, rows), optimizer, every) for optimizer in optimizers for every in recompute
        ]
        return iter(sorted(ways, key=lambda way: -way[0]))

    def _examine(self, optimizer: OptimizerName, activation_checkpointing: int, micro_batch: int | None) -> Candidate:
        key = optimizer, activation_checkpointing, micro_batch
        if key not in self._seen:
            self._seen[key] = self._found(*key)
        return self._seen[key]

    def _found(self, optimizer: OptimizerName, activation_checkpointing: int, micro_batch: int | None) -> Candidate:
        one = micro_batch or 1
        # Weights, gradients and states are all there while the weights are updated.
        size = self._predictor.size
        static = size.parameter_bytes + size.trained_bytes + STATE_BYTES[optimizer] * size.trained
        static += size.master_bytes if optimizer == "adamw" else 0
        if static + self._context > self._limit:
            return self._candidate(optimizer, activation_checkpointing, 0, one, {}, static + self._context)
        self._progress()
        setting = Setting(activation_checkpointing, optimizer)
        if micro_batch is not None:
            prediction = self._predictor.predict(self._shape(micro_batch), setting)
            rows = micro_batch if self._fits(prediction) else 0
        elif self._cap <= _FEW and self._fits(most := self._predictor.predict(self._shape(self._cap), setting)):
            rows, prediction = self._cap, most
        else:
            rows, prediction = self._predictor.most_rows(
                self._time.inputs, self._time.targets, setting, self._limit - self._context, self._cap
            )
        return self._candidate(optimizer, activation_checkpointing, rows, rows or one, prediction.parts)

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.peak + self._context <= self._limit

    def _candidate(
        self,
        optimizer: OptimizerName,
        activation_checkpointing: int,
        micro_batch: int,
        rows: int,
        parts: Mapping[str, int],
        peak: int | None = None,
    ) -> Candidate:
        """`rows`: those that the figures are of; `micro_batch`: the same, or 0 where they do not fit."""
        whole = {**parts, "context": self._context} if parts else {}
        return Candidate(
            optimizer=optimizer,
            activation_checkpointing=activation_checkpointing,
            micro_batch=micro_batch,
            peak_bytes=sum(whole.values()) if peak is None else peak,
            slowdown=self._time.seconds(rows, activation_checkpointing, optimizer) / self._fastest,
            score=self._score(optimizer, activation_checkpointing, rows),
            parts=whole,
        )

    def _score(self, optimizer: OptimizerName, activation_checkpointing: int, rows: int) -> float:
        return WORTH[optimizer] * self._fastest / self._time.seconds(rows, activation_checkpointing, optimizer)

    def _shape(self, rows: int) -> MicroBatchShape:
        return MicroBatchShape(rows, self._time.inputs, self._time.targets)


def choice(candidates: list[Candidate]) -> Candidate | None:
    """The first that fits."""
    return next((each for each in candidates if each.fits), None)


def _rank(candidate: Candidate) -> tuple[float, float, int]:
    """The best first: score, then the less recomputation, then the smaller peak."""
    every = candidate.activation_checkpointing
    return -candidate.score, 1 / every if every else 0.0, candidate.peak_bytes
