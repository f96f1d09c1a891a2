"""How fast the GPU of an attempt is, and how fast the model trains on it: measured figures, beside the runs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from jobs.disk.measured_file import keep_measured, read_measured
from jobs.gpus import peak_flops
from jobs.measured import MeasuredGpu
from worker.training.machine.device import gpu_id
from worker.training.machine.nvml import open_gpu

log = logging.getLogger("longhaul.gpu_speed")

STEPS = 200
"""Steps of an attempt that are measured, the first aside."""


class GpuSpeed:
    """Of one attempt. It holds the GPU's lock, so nobody else writes the figures of this GPU."""

    def __init__(
        self, runs: Path, uuid: str, name: str, driver: str | None, *, parameters: int, recomputed: float
    ) -> None:
        """`recomputed`: FLOPs of recomputed layers for each FLOP that MFU counts. `driver`: its version, or None."""
        self._runs, self._uuid, self._name, self._driver = runs, uuid, name, driver
        self._parameters, self._work = parameters, 1 + recomputed
        self._steps, self._flops, self._seconds = 0, 0.0, 0.0

    @classmethod
    def of(cls, runs: Path, device: torch.device, *, parameters: int, recomputed: float) -> GpuSpeed:
        """Of this CUDA device."""
        uuid = gpu_id(device)
        gpu = open_gpu(uuid)
        driver, name = None if gpu is None else gpu.driver(), torch.cuda.get_device_name(device)
        return cls(runs, uuid, name, driver, parameters=parameters, recomputed=recomputed)

    @property
    def peak(self) -> float | None:
        """FLOP/s of bf16 products, as measured, else by the data sheet; None if neither is known."""
        measured = self._read()
        return (measured and measured.gemm_flops) or peak_flops(self._name)

    def add(self, flops: float, seconds: float) -> None:
        """Count a step. After `STEPS` of them their rate is kept for the plans of later jobs."""
        self._steps += 1
        if 1 < self._steps <= STEPS + 1:
            self._flops += flops * self._work
            self._seconds += seconds
        if self._steps == STEPS + 1 and self._flops and self._seconds and self._driver is not None:
            before = self._read() or MeasuredGpu(driver=self._driver)
            try:
                keep_measured(
                    self._runs, self._uuid, before.with_training_flops(self._parameters, self._flops / self._seconds)
                )
            except OSError as error:
                log.warning("the training speed of %s is not kept: %s", self._name, error.strerror)

    def _read(self) -> MeasuredGpu | None:
        return read_measured(self._runs, self._uuid, self._driver)
