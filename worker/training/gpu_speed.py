"""How fast the GPU of an attempt is, and how fast the model trains on it: measured figures, beside the runs."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from jobs.disk.measured_file import keep_measured, read_measured
from jobs.gpus import peak_flops
from jobs.measured import MOST_OF_OTHERS, MeasuredGpu, TrainingRate
from worker.training.machine.device import gpu_id
from worker.training.machine.nvml import open_gpu
from worker.training.pace import usual

log = logging.getLogger("longhaul.gpu_speed")

STEPS = 200
"""Steps of an attempt that are measured, the first aside."""


class GpuSpeed:
    """Of one attempt. It holds the GPU's lock, so nobody else writes the figures of this GPU."""

    def __init__(
        self,
        runs: Path,
        uuid: str,
        name: str,
        driver: str | None,
        *,
        parameters: int,
        compiled: bool,
        recomputed: float,
        kept: bool = True,
    ) -> None:
        """`recomputed`: FLOPs of recomputed layers for each FLOP that MFU counts. `driver`: its version, or None.
        `compiled`: whether the plan has layers compiled. `kept`: the rate holds for other jobs."""
        self._runs, self._uuid, self._name, self._driver = runs, uuid, name, driver
        self._parameters, self._compiled, self._work = parameters, compiled, 1 + recomputed
        self._done, self._shared = 0, not kept
        self._steps: list[tuple[float, float]] = []
        """FLOPs and seconds of each that is measured."""

    @classmethod
    def of(
        cls, runs: Path, device: torch.device, *, parameters: int, compiled: bool, recomputed: float, kept: bool = True
    ) -> GpuSpeed:
        """Of this CUDA device."""
        uuid = gpu_id(device)
        gpu = open_gpu(uuid)
        driver, name = None if gpu is None else gpu.driver(), torch.cuda.get_device_name(device)
        return cls(runs, uuid, name, driver, parameters=parameters, compiled=compiled, recomputed=recomputed, kept=kept)

    @property
    def peak(self) -> float | None:
        """FLOP/s of bf16 products, as measured, else by the data sheet; None if neither is known."""
        measured = self._read()
        return (measured and measured.gemm_flops) or peak_flops(self._name)

    def beside(self, other_bytes: int) -> None:
        """Other processes hold so much of the GPU: where that is another job, the rate is not kept."""
        self._shared |= other_bytes > MOST_OF_OTHERS

    def add(self, flops: float, seconds: float) -> None:
        """Count a step. After `STEPS` of them their rate is kept for the plans of later jobs."""
        self._done += 1
        if 1 < self._done <= STEPS + 1:
            self._steps.append((flops, seconds))
        if self._done == STEPS + 1 and self._driver is not None and not self._shared:
            self._keep(self._driver)

    def _keep(self, driver: str) -> None:
        is_usual = usual(seconds for _, seconds in self._steps)
        counted = [step for step in self._steps if is_usual(step[1])]
        flops, seconds = map(sum, zip(*counted, strict=True))
        if not (flops and seconds):
            return
        rate = TrainingRate(
            parameters=self._parameters,
            compiled=self._compiled,
            step_flops=flops / len(counted),
            flops_per_s=self._work * flops / seconds,
        )
        before = self._read() or MeasuredGpu(driver=driver)
        try:
            keep_measured(self._runs, self._uuid, before.with_training(rate))
        except OSError as error:
            log.warning("the training speed of %s is not kept: %s", self._name, error.strerror)

    def _read(self) -> MeasuredGpu | None:
        return read_measured(self._runs, self._uuid, self._driver)
