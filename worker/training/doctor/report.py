"""What the doctor says at the end: speed and time for FLAN-T5-XL, JSON, and a page to paste into an issue.

No host name, user, path or secret is in any of them.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence

from jobs.frozen import Frozen
from jobs.gpus import GpuFacts
from jobs.measured import MeasuredGpu, TrainingRate
from jobs.text.units import format_duration
from jobs.version import VERSION
from worker.training.doctor.finding import Finding

ROWS, EPOCHS = 6_000_000, 5
SHAPE = re.compile(r"\d+/\d+")
MOST_MFU = 1.05
"""Above it the GPU did not compute."""


class DoctorReport(Frozen):
    """All findings of one examination."""

    version: str = VERSION
    """Of Longhaul."""
    gpu: str | None
    """As its driver names it; null on a CPU."""
    memory_bytes: int | None
    """Of the GPU."""
    seconds: float
    """That the examination took."""
    findings: list[Finding]
    """In order."""

    @property
    def counts(self) -> Counter[str]:
        """How many of each status."""
        return Counter(finding.status for finding in self.findings)

    def of(self, check: str) -> Finding | None:
        """Of one check."""
        return next((finding for finding in self.findings if finding.check == check), None)

    @property
    def rates(self) -> dict[str, float]:
        """Rows a second by shape, such as `128/256`."""
        found = self.of("throughput")
        return {} if found is None else {name: rate for name, rate in found.values.items() if SHAPE.fullmatch(name)}

    @property
    def doubted(self) -> bool:
        """Whether the speed of the steps says nothing: the GPU did not compute, or layers were compiled meanwhile."""
        mfu, graphs = self.of("mfu"), self.of("graphs")
        computed = mfu is None or mfu.status != "FAIL" or mfu.values.get("mfu", math.inf) <= MOST_MFU
        return not computed or (graphs is not None and graphs.status == "FAIL")

    def measured(self, driver: str, at: int) -> MeasuredGpu:
        """What replaces nominal figures. What failed is left out, and so is the peak of a slow GPU; but steps are as
        fast as they are, also where that is too slow.
        """
        gemm, power, load = self.of("gemm"), self.of("power"), self.of("load")
        steady = gemm is not None and gemm.status == "PASS" and (power is None or power.status != "WARN")
        mfu, training = self.of("mfu"), []
        if load is not None and mfu is not None and not self.doubted:
            facts, speed = load.values, mfu.values
            if facts.get("activation_checkpointing") == 0 and "flops" in speed:
                rate = TrainingRate(
                    parameters=int(facts["parameters"]), compiled=bool(facts["compiled"]),
                    step_flops=speed["step_flops"], flops_per_s=speed["flops"],
                )  # fmt: skip
                training = [rate]
        return MeasuredGpu(
            driver=driver,
            examined_at=at,
            gemm_flops=self.figure("gemm", "flops") if steady else None,
            memory_bytes_per_s=self.figure("memory_bandwidth", "bytes_per_s"),
            host_to_device_bytes_per_s=self.figure("host_to_device", "bytes_per_s"),
            device_to_host_bytes_per_s=self.figure("device_to_host", "bytes_per_s"),
            host_update_per_s=self.figure("host_update", "numbers_per_s"),
            update_s=self.figure("update", "seconds"),
            model=None if load is None else load.model,
            rows_per_s={} if self.doubted else self.rates,
            training=training,
        )

    def figure(self, check: str, name: str) -> float | None:
        """Of one check; None: it was not measured, or failed."""
        found = self.of(check)
        return None if found is None or found.status == "FAIL" else found.values.get(name)

    @property
    def summary(self) -> list[str]:
        """Lines for people."""
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.counts.items()))
        lines = [f"{counts} in {format_duration(self.seconds)}"]
        loaded = self.of("load")
        name = None if loaded is None else loaded.model
        if self.gpu is not None and name is not None and not self.doubted:
            lines += [
                f"FLAN-T5-{name.upper()} at {shape} tokens: {rate:.1f} rows/s, so {EPOCHS} epochs of "
                f"{ROWS / 1e6:.0f} M rows take {format_duration(ROWS * EPOCHS / rate)}"
                for shape, rate in self.rates.items()
            ]
        return lines

    def to_json(self) -> str:
        """One line."""
        days = {shape: ROWS * EPOCHS / rate / 86_400 for shape, rate in self.rates.items()}
        return json.dumps({**self.model_dump(), "counts": dict(self.counts), "rows_per_s": self.rates, "days": days})

    def page(self) -> str:
        """Markdown."""
        gpu = "a CPU" if self.gpu is None else self.gpu
        rows = [
            f"| {each.status} | {each.check} | {_cell(each.figure)} | {_cell(each.limit)} | {_cell(each.hint)} |"
            for each in self.findings
        ]
        head = ["| status | check | figure | limit | what to do |", "|---|---|---|---|---|"]
        lines = [f"# Longhaul {self.version} on {gpu}", "", *head, *rows, "", *(f"- {line}" for line in self.summary)]
        return "\n".join(lines) + "\n"


def make_report(findings: Sequence[Finding], gpu: GpuFacts | None, seconds: float) -> DoctorReport:
    """Of what was found."""
    return DoctorReport(
        gpu=None if gpu is None else gpu.name,
        memory_bytes=None if gpu is None else gpu.memory_bytes,
        seconds=seconds,
        findings=list(findings),
    )


def _cell(text: str | None) -> str:
    return "" if text is None else text.replace("|", "\\|").replace("\n", " ")
