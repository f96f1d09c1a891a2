"""How long a row takes, as far as the ladder's choice depends on it: calculated, not measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jobs.gpus import REFERENCE, GpuFacts
from jobs.memory_plan import OptimizerName
from jobs.plan import EXPECTED_SHARE
from worker.training.planning.prediction import ModelSize
from worker.training.tasks.task import Config, Flops, Task

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
