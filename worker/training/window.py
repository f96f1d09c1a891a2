"""The window: the steps since the last row of metrics. It goes into checkpoints: a resumed run logs the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from pydantic import BaseModel, ConfigDict, Field

from jobs.metrics import MetricRow
from jobs.text.units import format_duration, format_figure, format_number
from worker.training.gpu_speed import GpuSpeed
from worker.training.machine.device import gpu_id
from worker.training.machine.host import host_memory
from worker.training.machine.nvml import GpuUse, NvmlGpu, open_gpu
from worker.training.machine.out_of_memory import MemoryProbe
from worker.training.machine.usage import Cache, MemoryUse, memory_use, process_bytes
from worker.training.pace import Durations, Pace
from worker.training.steps.result import StepResult

log = logging.getLogger("longhaul.trainer")
LOGGED_EVERY_S = 30.0
FRAGMENTED, FULL = 0.25, 0.9
"""Shares: of the reserved memory that was not in use even at the peak; of the budget that is reserved."""


class Window(BaseModel):
    """Sums over the steps since the last row; losses and norms step by step, so that means are the same bit for bit."""

    model_config = ConfigDict(extra="forbid")

    losses: list[float] = []
    grad_norms: list[float] = []
    """Without those of steps whose update was skipped, which are not finite."""
    rows: int = 0
    input_tokens: int = 0
    target_tokens: int = 0
    padded_tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    data_wait_s: float = 0.0
    asides: Durations = Field(default_factory=Durations)
    """Outlives the window: used to estimate the time left."""


@dataclass
class Meter:
    """Adds steps up without waiting for the device, and makes rows of them."""

    cache: Cache
    attempt: int
    pace: Pace
    window: Window
    planned_bytes: int | None = None
    """Peak as predicted for the largest micro-batch; None where it was not planned."""
    monitor: MemoryProbe | None = None
    """The other processes on the GPU; None if not monitored."""
    speed: GpuSpeed | None = None
    """Of the GPU; None on a CPU."""
    gpu: NvmlGpu | None = field(init=False, repr=False)
    """None on CPU, and if the driver reports nothing."""
    peak: float | None = field(init=False)
    """FLOP/s of the GPU at most; None on CPU, and for a GPU that is not in our table."""
    _pending: list[tuple[torch.Tensor, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        device = self.cache.device
        on_gpu = device.type == "cuda"
        self.gpu = open_gpu(gpu_id(device)) if on_gpu else None
        self.peak = None if self.speed is None else self.speed.peak

    def add(self, result: StepResult) -> None:
        """Count one step; its time is that since the step before, without evaluations and checkpoints."""
        skipped = result.scaled is not None and result.scaled.skipped
        self._pending.append((torch.stack([result.loss.double(), result.grad_norm.double()]), skipped))
        self.window.rows += result.rows
        self.window.input_tokens += result.input_tokens
        self.window.target_tokens += result.target_tokens
        self.window.padded_tokens += result.padded_tokens
        self.window.flops += result.flops
        seconds = self.pace.step()
        self.window.seconds += seconds
        self.window.data_wait_s += result.data_wait_s
        if self.speed is not None:
            self.speed.add(result.flops, seconds)

    def synchronize(self) -> Window:
        """The window with every number on the host. Waits for the device."""
        if self._pending:
            numbers = torch.stack([both for both, _ in self._pending]).tolist()
            for (loss, norm), (_, skipped) in zip(numbers, self._pending, strict=True):
                self.window.losses.append(loss)
                if not skipped:
                    self.window.grad_norms.append(norm)
            self._pending.clear()
        return self.window

    def row(self, result: StepResult, now: float) -> MetricRow:
        """The row that ends with `result` at Unix time `now`; a new window begins.

        GPU and host are read here only: once a row, not once a step.
        """
        window = self.synchronize()
        count, seconds = len(window.losses), max(window.seconds, 1e-9)
        memory, host = memory_use(self.cache.device), host_memory()
        gpu = self.gpu.use() if self.gpu is not None else GpuUse()
        other_processes = self.monitor.use() if self.monitor is not None else None
        if self.speed is not None and other_processes is not None:
            self.speed.beside(other_processes.bytes)
        on_gpu = self.cache.device.type == "cuda"
        tokens, flops = window.input_tokens + window.target_tokens, window.flops / seconds
        row = MetricRow(
            step=result.step,
            at=now,
            attempt=self.attempt,
            epoch=result.epoch,
            loss=sum(window.losses) / count,
            learning_rate=result.learning_rate,
            grad_norm=sum(window.grad_norms) / len(window.grad_norms) if window.grad_norms else None,
            loss_scale=result.scaled and result.scaled.loss_scale,
            skipped_updates=result.scaled and result.scaled.skipped_updates,
            rows_per_s=window.rows / seconds,
            target_tokens_per_s=window.target_tokens / seconds,
            tokens_per_s=tokens / seconds,
            padding_fraction=1 - tokens / window.padded_tokens if window.padded_tokens else None,
            model_flops_per_s=flops or None,
            mfu=flops / self.peak if flops and self.peak else None,
            step_s=seconds / count,
            eta_s=self.pace.left_s(result.step),
            memory_bytes=memory.allocated,
            memory_reserved_bytes=memory.reserved,
            memory_planned_bytes=self.planned_bytes,
            memory_fragmentation=fragmentation(memory) if on_gpu else None,
            gpu_memory_other_processes_bytes=None if other_processes is None else other_processes.bytes,
            cache_clears=self.cache.clears,
            cache_clear_s=self.cache.seconds,
            cache_freed_bytes=self.cache.freed,
            micro_batch=result.micro_batch,
            data_wait_fraction=min(1.0, window.data_wait_s / seconds),
            gpu_utilization=gpu.utilization,
            gpu_memory_used_bytes=gpu.memory_used,
            gpu_temperature_c=gpu.temperature_c,
            gpu_power_w=gpu.power_w,
            host_memory_used_bytes=host.used,
            host_memory_available_bytes=host.available,
            trainer_rss_bytes=process_bytes("VmRSS"),
        )
        self.window = Window(asides=self.pace.asides)  # the same object: later measurements are in it, too
        return row


def fragmentation(use: MemoryUse) -> float:
    """Share of the reserved memory that was not allocated at the peak, 0 to 1."""
    return max(0.0, 1 - use.allocated / use.reserved) if use.reserved else 0.0


def is_fragmented(row: MetricRow, budget: int) -> bool:
    """Whether to clear the cache at once: the budget is nearly used up, and much of that by memory not in use."""
    lost = row.memory_fragmentation
    return lost is not None and lost > FRAGMENTED and row.memory_reserved_bytes > FULL * budget


class ProgressLog:
    """Rows of metrics as lines of the log, the first at once, then at most two a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()

    def add(self, row: MetricRow, steps: int) -> None:
        """Log it if it is time. `steps`: of the whole run, as it stands."""
        if self._clock() < self._next and row.step < steps:
            return
        self._next = self._clock() + LOGGED_EVERY_S
        left = f", {format_duration(row.eta_s)} left" if row.step < steps else ""
        loss, pace = format_figure(row.loss), format_number(row.rows_per_s, 3)
        log.info("step %d of %d: training loss %s, %s rows/s%s", row.step, steps, loss, pace, left)
