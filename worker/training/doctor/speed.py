"""How fast the GPU is: matrix products of FLAN-T5-XL's own shapes, its memory, its slot, and what holds it back."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from jobs.gpus import memory_bandwidth, peak_flops
from jobs.text.units import GIB, MIB, format_rate, format_share
from worker.training.doctor.finding import Check, Examination, Finding, judge
from worker.training.doctor.random_t5 import SHAPES
from worker.training.machine.device import gpu_id
from worker.training.machine.nvml import GpuClock, GpuPower, GpuUse, NvmlGpu, open_gpu
from worker.training.optimizers.adamw_offload import AdamWOffload

TOKENS = 8 * 256
"""Of a micro-batch: what matrices are multiplied with."""
LEAST_SHARE, POOR_SHARE = 0.75, 0.5
"""Of the nominal peak: below the first the GPU is slow, below the second something is wrong."""
IMPOSSIBLE = 1.5
"""So far above its nominal figures no GPU runs: it did not compute, or did not copy."""
FASTEST_COPY = 1e12
"""Bytes a second between host and GPU that no slot reaches, where the bandwidth of the GPU's memory is unknown."""
UPDATED = 2**26
"""Numbers that the host updates: two loads."""
LEAST_UPDATES, MOST_UPDATES = 0.5e9, 1e11
"""Numbers a second that the host updates: with two channels of memory at least, and beyond what any host does."""
LEAST_COPY = 20e9
"""Bytes a second of a slot with 16 lanes of PCIe 4."""
SLOW = "see power and free_memory: the GPU is slowed down, or shared"
SECONDS, LONG_S = 0.1, 3.0
"""Of one measurement; of the one during which power and clock are watched."""
LOOK_S = 0.1
AT_LIMIT = 0.97
"""Of the limit of power: a GPU that takes so much of it is held by it."""


class Watch(threading.Thread):
    """Asks NVML again and again, until `stop`."""

    def __init__(self, gpu: NvmlGpu | None) -> None:
        super().__init__(name="watch", daemon=True)
        self._gpu, self._stop_asked = gpu, threading.Event()
        self.uses: list[GpuUse] = []
        self.clocks: list[GpuClock] = []

    def run(self) -> None:
        """Until asked to stop."""
        while self._gpu is not None and not self._stop_asked.wait(LOOK_S):
            self.uses.append(self._gpu.use())
            self.clocks.append(self._gpu.clock())

    def stop(self) -> None:
        """Wait for its end."""
        self._stop_asked.set()
        self.join()


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name."""
    device = torch.device(examination.device)
    name = torch.cuda.get_device_name(device)
    gpu = open_gpu(gpu_id(device))
    watch = Watch(gpu)

    def gemm() -> Finding:
        watch.start()
        rate = gemm_rate(device)
        watch.stop()
        return judge_gemm(rate, peak_flops(name), at_limit=at_power_limit(watch.uses, limit()))

    def limit() -> GpuPower:
        return GpuPower() if gpu is None else gpu.power()

    def power() -> Finding:
        return judge_power(watch.uses, watch.clocks, limit())

    def bandwidth() -> Finding:
        source = torch.empty(GIB, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return judge_bandwidth(2 * GIB / seconds_of(lambda: target.copy_(source), device), memory_bandwidth(name))

    def copy_check(check: str, *, onto: bool) -> Check:
        def measure() -> Finding:
            host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
            there = torch.empty_like(host, device=device)
            source, target = (host, there) if onto else (there, host)
            rate = host.nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True), device)
            return judge_copy(check, rate, memory_bandwidth(name))

        return measure

    def host_update() -> Finding:
        weight = nn.Parameter(torch.zeros(UPDATED, dtype=torch.bfloat16, device=device))
        weight.grad = torch.ones_like(weight)
        optimizer = AdamWOffload([("weight", weight)], weight_decay=0.0, max_grad_norm=None, fused=True)
        return judge_host_update(UPDATED / seconds_of(lambda: optimizer.host_half(1e-6, 1.0), device))

    return {
        "gemm": gemm,
        "power": power,
        "memory_bandwidth": bandwidth,
        "host_to_device": copy_check("host_to_device", onto=True),
        "device_to_host": copy_check("device_to_host", onto=False),
        "host_update": host_update,
    }


def at_power_limit(uses: Sequence[GpuUse], limit: GpuPower) -> bool:
    """Whether the GPU took all the power that it was delivered with: it computes as much as that allows, and the
    nominal peak, at its full clock, may be out of reach.
    """
    lowered = limit.limit is not None and limit.default is not None and limit.limit < limit.default
    most = max((use.power_w for use in uses if use.power_w is not None), default=0.0)
    return limit.limit is not None and not lowered and most >= AT_LIMIT * limit.limit


def judge_gemm(rate: float, nominal: float | None, *, at_limit: bool = False) -> Finding:
    """Of FLOP/s, against the nominal peak if that is known. `at_limit`: as `at_power_limit` says."""
    share = None if nominal is None else rate / nominal
    impossible = share is not None and share > IMPOSSIBLE
    of = (
        "its nominal peak is not in Longhaul's table" if share is None else f"{format_share(share)} of the nominal peak"
    )
    of += ", at the limit of its power" if at_limit else ""
    return judge(
        "gemm", f"{rate / 1e12:.1f} TFLOP/s in bf16 products of FLAN-T5-XL's shapes, {of}", limit=limit_of(share),
        fail=impossible or (share is not None and share < POOR_SHARE),
        warn=share is not None and share < LEAST_SHARE and not at_limit,
        hint="report it: the GPU did not compute" if impossible else SLOW, flops=rate,
    )  # fmt: skip


def judge_power(uses: Sequence[GpuUse], clocks: Sequence[GpuClock], limit: GpuPower) -> Finding:
    """Of what NVML said during the products."""
    watts = [use.power_w for use in uses if use.power_w is not None]
    degrees = [use.temperature_c for use in uses if use.temperature_c is not None]
    mhz = sorted(clock.mhz for clock in clocks if clock.mhz is not None)
    reasons = sorted({reason for clock in clocks for reason in clock.slowed_by})
    if not (watts or degrees or mhz or reasons):
        return judge("power", "NVML tells nothing of it", warn=True, hint="see nvml")
    lowered = limit.limit is not None and limit.default is not None and limit.limit < limit.default
    parts = [
        *([f"{max(watts):.0f} W" + (f" of {limit.limit:.0f} W" if limit.limit else "")] if watts else []),
        *([f"limit lowered from {limit.default:.0f} W"] if lowered else []),
        *([f"{mhz[len(mhz) // 2]} MHz"] if mhz else []),
        *([f"{max(degrees)} °C"] if degrees else []),
        f"slowed down by {', '.join(reasons)}" if reasons else "not slowed down",
    ]
    hint = "improve the cooling" if reasons else "nvidia-smi -pl sets the limit of its power"
    return judge("power", f"during the products: {', '.join(parts)}", limit="not slowed down",
                 warn=bool(reasons) or lowered, hint=hint,
                 watts=max(watts, default=math.nan), celsius=max(degrees, default=math.nan))  # fmt: skip


def judge_bandwidth(rate: float, nominal: float | None) -> Finding:
    """Of bytes a second, against the nominal bandwidth if that is known."""
    share = None if nominal is None else rate / nominal
    impossible = share is not None and share > IMPOSSIBLE
    of = "" if share is None else f", {format_share(share)} of the nominal"
    return judge("memory_bandwidth", f"{format_rate(rate)}{of}", limit=limit_of(share), fail=impossible,
                 warn=share is not None and share < LEAST_SHARE,
                 hint="report it: the GPU did not copy" if impossible else SLOW, bytes_per_s=rate)  # fmt: skip


def judge_copy(check: str, rate: float, nominal: float | None) -> Finding:
    """Of bytes a second between host and GPU; `nominal`: bandwidth of the GPU's memory, if known."""
    most = nominal or FASTEST_COPY
    hint = (
        "report it: the GPU did not copy"
        if rate > most
        else "slot below x16 Gen4: use another slot, and look at its speed in the firmware"
    )
    return judge(check, f"{format_rate(rate)}, pinned", limit=f"{format_rate(LEAST_COPY)} to {format_rate(most)}",
                 fail=rate > most, warn=rate < LEAST_COPY, hint=hint, bytes_per_s=rate)  # fmt: skip


def judge_host_update(rate: float) -> Finding:
    """Of numbers a second that come from the GPU, are updated by the host, and go back."""
    impossible = rate > MOST_UPDATES
    hint = "report it: nothing was updated" if impossible else (
        "adamw_offload is slow here: look at the memory channels of the host, its cores, and what else runs there"
    )  # fmt: skip
    return judge("host_update", f"the host updates {rate / 1e9:.2f} G weights/s (adamw_offload)",
                 limit=f"≥ {LEAST_UPDATES / 1e9:.1f}", fail=impossible, warn=rate < LEAST_UPDATES, hint=hint,
                 numbers_per_s=rate)  # fmt: skip


def limit_of(share: float | None) -> str | None:
    """Of a share of a nominal figure."""
    return None if share is None else f"{format_share(LEAST_SHARE)} to {format_share(IMPOSSIBLE)}"


def gemm_rate(device: torch.device) -> float:
    """FLOP/s over one layer and the head of FLAN-T5-XL: forward, and both products of the backward pass."""
    config = SHAPES["xl"]
    width, heads, wide = config["d_model"], config["num_heads"] * config["d_kv"], config["d_ff"]
    # Inputs, outputs, how often in the two stacks: projections of attention, gated feed-forward, head.
    matrices = [(width, heads, 24 * 12), (width, wide, 48 * 2), (wide, width, 48), (width, config["vocab_size"], 1)]
    products = []
    for inputs, outputs, times in matrices:
        x, y = (torch.randn(TOKENS, size, device=device, dtype=torch.bfloat16) for size in (inputs, outputs))
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
        for left, right in ((x, weight.T), (y, weight), (y.T, x)):
            flops = 2.0 * left.shape[0] * left.shape[1] * right.shape[1]
            products.append((left, right, times * flops, times))
    until = time.perf_counter() + LONG_S
    seconds_of(lambda: [torch.mm(left, right) for left, right, _, _ in products], device)
    total = flops_done = 0.0
    while not total or time.perf_counter() < until:
        total, flops_done = 0.0, 0.0
        for left, right, flops, times in products:
            total += times * seconds_of(lambda left=left, right=right: torch.mm(left, right), device)  # type: ignore[misc]
            flops_done += flops
    return flops_done / total


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Of one call, warm: from as many as fill `SECONDS`."""
    call()
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    count = max(2, min(1000, int(SECONDS / max(1e-6, time.perf_counter() - begun))))
    begun = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begun) / count
