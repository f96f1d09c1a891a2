"""What one check has found (a line for people, figures for programs), and the groups in which checks run."""

from __future__ import annotations

import importlib
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from jobs.frozen import Frozen
from jobs.gpus import GpuFacts
from jobs.memory_plan import Device

Status = Literal["PASS", "WARN", "FAIL", "SKIP"]
_FOLDERS = re.compile(r"(?<![:/\w])/(?:[^\s'\",:;()\[\]/]+/)+")
"""Of a path in an error: a page for others must not name a person's folders."""


class Finding(Frozen):
    """The result of one check."""

    check: str
    """Its name, as in the groups below."""
    status: Status
    """`SKIP`: it does not apply here, or there was no time for it."""
    figure: str
    """What was measured; of a skipped check the reason."""
    limit: str | None = None
    """What is asked for."""
    hint: str | None = None
    """What to do."""
    values: dict[str, float] = Field({})
    """The figures for programs, in SI units and bytes."""
    model: str | None = None
    """Which one was loaded, as `--model` names it."""

    @property
    def line(self) -> str:
        """For people."""
        limit = f" (limit: {self.limit})" if self.limit and self.status != "SKIP" else ""
        hint = f"; {self.hint}" if self.hint and self.status in ("WARN", "FAIL") else ""
        return f"{self.status}  {self.check}: {self.figure}{limit}{hint}"


def judge(
    check: str,
    figure: str,
    *,
    limit: str | None = None,
    fail: bool = False,
    warn: bool = False,
    hint: str | None = None,
    **values: float,
) -> Finding:
    """FAIL, else WARN, else PASS."""
    status: Status = "FAIL" if fail else "WARN" if warn else "PASS"
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Finding(check=check, status=status, figure=figure, limit=limit, hint=hint, values=finite)


def skip(check: str, reason: str) -> Finding:
    """A check that was not made."""
    return Finding(check=check, status="SKIP", figure=reason)


def failed(check: str, error: BaseException) -> Finding:
    """A check that raised."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return Finding(
        check=check,
        status="FAIL",
        figure=_FOLDERS.sub("…/", lines[0])[:500],
        hint="report it, with the page of --report",
    )


# -- groups ------------------------------------------------------------------------------------------------------------
# The checks, in groups: each group is a module of this package with a function `checks`, and runs in its own process.
#
# The order is that of the report. What later groups need comes first; what takes long comes last.

GROUPS: Mapping[str, tuple[str, ...]] = {
    "machine": (
        "driver", "compute_capability", "architecture", "nvml", "compiler", "host_memory", "disk", "clock",
    ),
    "memory": ("free_memory", "context", "hard_limit"),
    "speed": ("gemm", "power", "memory_bandwidth", "host_to_device", "device_to_host", "host_update"),
    "exactness": ("eager_gradients", "compiled_gradients", "attention_kernels"),
    "resume": ("resume",),
    "training": (
        "load", "compile_cold", "graphs", "peak", "waits", "mfu", "update", "throughput", "weights_in_place",
        "checkpoint_copy", "oversized_batch",
    ),
    "warm": ("compile_warm",),
}  # fmt: skip
NEEDS_WHOLE_GPU = ("speed", "training", "warm")
"""Groups whose figures mean nothing while another process computes."""
NEEDS_GPU = frozenset(
    {
        *("driver", "compute_capability", "architecture", "nvml", *GROUPS["memory"], *GROUPS["speed"]),
        *("attention_kernels", "peak", "waits", "mfu", "oversized_batch"),
    }
)


@dataclass(frozen=True)
class Examination:
    """What the checks of one process know."""

    device: Device
    folder: Path
    """Theirs, empty at first; on the disk of the run directories."""
    model: str | None
    """Name in `random_t5.SHAPES`; None: the largest FLAN-T5 that fits, on a CPU a tiny one."""
    until: float
    """By time.monotonic(): no check begins later."""
    gpu: GpuFacts | None = None
    """As nvidia-smi describes it."""
    compile_s: float | None = None
    """Seconds that layers took to compile with empty caches, as measured by an earlier group."""
    gemm_flops: float | None = None
    """FLOP/s, as measured by an earlier group."""
    other_bytes: float = 0.0
    """What other processes held of the GPU, as measured by an earlier group."""

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()


Check = Callable[[], Finding]


def run_group(name: str, examination: Examination, tell: Callable[[Finding], object]) -> None:
    """Make the checks of one group, in order, and tell what each has found. None of them raises."""
    wanted = [check for check in GROUPS[name] if examination.device == "cuda" or check not in NEEDS_GPU]
    for check in GROUPS[name]:
        if check not in wanted:
            tell(skip(check, "no GPU"))
    if not wanted:
        return
    try:
        checks: Mapping[str, Check] = importlib.import_module(f"worker.training.doctor.{name}").checks(examination)
        assert checks.keys() == set(GROUPS[name]), "the table names each check"
    except Exception as error:
        for check in wanted:
            tell(failed(check, error))
        return
    for check in wanted:
        if examination.left_s <= 0:
            tell(skip(check, "no time was left"))
            continue
        try:
            tell(checks[check]())
        except Exception as error:
            tell(failed(check, error))
