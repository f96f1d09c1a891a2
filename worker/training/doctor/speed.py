"""How fast the GPU is: matrix products of FLAN-T5-XL's own shapes, its memory, its slot, and what holds it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from jobs.gpus import memory_bandwidth, peak_flops
from jobs.text.units import GIB, MIB, format_rate
from worker.training.doctor.finding import Finding, judge
from worker.training.doctor.groups import Check, Examination
from worker.training.doctor.random_t5 import SHAPES
from worker.training.machine.device import gpu_id
from worker.training.machine.nvml import GpuClock, GpuUse, NvmlGpu, open_gpu

TOKENS = 8 * 256
"""Of a micro-batch: what matrices are multiplied with."""
LEAST_SHARE, POOR_SHARE = 0.75, 0.5
"""Of the nominal peak: below the first the GPU is slow, below the second something is wrong."""
IMPOSSIBLE = 1.5
"""So far above its nominal peak no GPU runs: it did not compute."""
LEAST_COPY = 20e9
"""Bytes a second of a slot with 16 lanes of PCIe 4."""
MOST_COPY = 1e12
"""Faster than NVLink between CPU and GPU (450 GB/s)."""
SECONDS, LONG_S = 0.1, 3.0
"""Of one measurement; of the one during which power and clock are watched."""
LOOK_S = 0.1


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
        nominal = peak_flops(name)
        share = None if nominal is None else rate / nominal
        of = "its nominal peak is not in Longhaul's table" if share is None else f"{share:.0%} of the nominal peak"
        return judge(
            "gemm", f"{rate / 1e12:.1f} TFLOP/s in bf16 products of FLAN-T5-XL's shapes, {of}",
            limit=None if share is None else f"≥ {LEAST_SHARE:.0%}",
            fail=share is not None and not POOR_SHARE <= share <= IMPOSSIBLE,
            warn=share is not None and share < LEAST_SHARE, hint="see power: the GPU is slowed down, or shared",
            flops=rate,
        )  # fmt: skip

    def power() -> Finding:
        if gpu is None or not watch.uses:
            return judge("power", "NVML tells nothing of it", warn=True, hint="see nvml")
        limit = gpu.power()
        if all(use.power_w is None for use in watch.uses) and all(clock.mhz is None for clock in watch.clocks):
            return judge("power", "NVML tells neither power nor clocks", warn=True, hint="see nvml")
        watts = max((use.power_w or 0.0 for use in watch.uses), default=0.0)
        warmest = max((use.temperature_c or 0 for use in watch.uses), default=0)
        clocks = sorted(clock.mhz for clock in watch.clocks if clock.mhz is not None)
        reasons = sorted({reason for clock in watch.clocks for reason in clock.slowed_by})
        lowered = limit.limit is not None and limit.default is not None and limit.limit < limit.default
        parts = [
            f"{watts:.0f} W" + (f" of {limit.limit:.0f} W" if limit.limit else ""),
            *([f"lowered from {limit.default:.0f} W"] if lowered else []),
            *([f"{clocks[len(clocks) // 2]} MHz"] if clocks else []),
            f"{warmest} °C",
            f"slowed down by {', '.join(reasons)}" if reasons else "not slowed down",
        ]
        hint = "improve the cooling" if reasons else "nvidia-smi -pl sets the limit of its power"
        return judge("power", f"during the products: {', '.join(parts)}", limit="not slowed down",
                     warn=bool(reasons) or lowered, hint=hint, watts=watts, celsius=warmest)  # fmt: skip

    def bandwidth() -> Finding:
        source = torch.empty(GIB, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        rate = 2 * GIB / seconds_of(lambda: target.copy_(source), device)
        nominal = memory_bandwidth(name)
        share = None if nominal is None else rate / nominal
        of = "" if share is None else f", {share:.0%} of the nominal"
        fast = share is not None and share > IMPOSSIBLE
        return judge("memory_bandwidth", f"{format_rate(rate)}{of}",
                     limit=None if share is None else f"≥ {LEAST_SHARE:.0%}", fail=fast,
                     warn=share is not None and share < LEAST_SHARE,
                     hint="faster than is possible: the GPU copied nothing" if fast else "see power",
                     bytes_per_s=rate)  # fmt: skip

    def copy_check(check: str, *, onto: bool) -> Check:
        def measure() -> Finding:
            host = torch.empty(256 * MIB, dtype=torch.uint8, pin_memory=True)
            there = torch.empty_like(host, device=device)
            source, target = (host, there) if onto else (there, host)
            rate = host.nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True), device)
            fast = rate > MOST_COPY
            hint = "slot below x16 Gen4: use another slot, and look at its speed in the firmware"
            return judge(check, f"{format_rate(rate)}, pinned", limit=f"≥ {format_rate(LEAST_COPY)}", fail=fast,
                         warn=rate < LEAST_COPY,
                         hint="faster than any slot: the GPU copied nothing" if fast else hint,
                         bytes_per_s=rate)  # fmt: skip

        return measure

    return {
        "gemm": gemm,
        "power": power,
        "memory_bandwidth": bandwidth,
        "host_to_device": copy_check("host_to_device", onto=True),
        "device_to_host": copy_check("device_to_host", onto=False),
    }


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
