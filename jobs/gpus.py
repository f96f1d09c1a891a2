"""What GPUs can do at most, by the name that the driver gives them; and the GPU that a job is planned for.

Peaks are of dense bf16 matrix products with fp32 accumulation.

At the boost clock of the data sheet; a GPU that is cooled well enough to run faster can exceed it by some percent.
Sources: NVIDIA's data sheets and architecture white papers, of figures with sparsity the half. Each figure was found
alike in two places, such as the tables that nanochat (`get_peak_flops`) and torchtitan compute their MFU with, or
(matrix cores x rate x clock) of hardware databases. A GPU with contradicting figures (L40, RTX PRO 6000 Server
Edition) is left out. Names are compared whole: a laptop's 5090, a 5090 D or a slice of a GPU (MIG) is another GPU.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from jobs.measured import MeasuredGpu

GPU = "LONGHAUL_GPU"
"""Environment variable by which a supervisor tells check and prepare which GPU will train (`GpuFacts`)."""


DRIVER_BYTES = 2**29
"""The part of the GPU's memory, by nvidia-smi, that the driver keeps: torch finds 31.4 GiB of an RTX 5090's 31.84."""
COPY_BYTES_PER_S, HOST_UPDATE_PER_S = 20e9, 1e9
"""Until `longhaul doctor` has measured them: bytes a second between host and GPU, in 16 lanes of PCIe 4; and weights
that the host updates in a second, for each of which it moves 28 bytes. Typical figures, not measured here."""
HOST_ROOM = 2 * 2**30
"""Bytes of a host's memory that stay free for everything else, beside copies of weights and states of optimizers."""
MARGIN = 0.03
"""Share of the budget on a GPU that stays free, for free memory in pieces too small to use."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU as its worker reported it."""

    name: str
    memory_bytes: int
    """All of it, as nvidia-smi says: the driver keeps some hundred MiB for itself."""
    measured: MeasuredGpu | None = None
    """None: nothing was measured."""
    native_bf16: bool = True
    """Whether it multiplies bf16 itself: from compute capability 8.0 on. Others train with a model in fp16."""
    host_memory_bytes: int | None = None
    """Of the machine, or container, that trains on it; None: not known."""
    count: int = 1
    """GPUs that train together; the other figures are those of one."""

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of bf16 products: as measured, else by the data sheet; None if neither is known."""
        return (self.measured and self.measured.gemm_flops) or peak_flops(self.name)

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes a second of its memory: as measured, else by the data sheet; None if neither is known."""
        return (self.measured and self.measured.memory_bytes_per_s) or memory_bandwidth(self.name)

    def training_flops(self, parameters: int, compiled: bool, step_flops: float) -> float | None:
        """FLOP/s that training reached with such a model and steps of about so many FLOPs; None: none was trained."""
        known = [] if self.measured is None else self.measured.training
        fitting = [rate for rate in known if rate.holds_for(parameters, compiled, step_flops)]
        nearest = min(fitting, key=lambda rate: abs(math.log(rate.step_flops / step_flops)), default=None)
        return None if nearest is None else nearest.flops_per_s

    def offloaded_update_s(self, numbers: int, number_bytes: int) -> float:
        """Seconds in which the host updates so many weights of a GPU, each of so many bytes: as measured, else assumed.

        Gradients come, and weights go back, meanwhile: the slowest counts.
        """
        measured = self.measured
        if measured is not None and measured.host_update_per_s is not None:
            return numbers / measured.host_update_per_s
        return numbers * max(number_bytes / self._copy_bytes_per_s, 1 / HOST_UPDATE_PER_S)

    def exchange_s(self, numbers: int, gpus: int) -> float:
        """Seconds in which so many GPUs add up so many gradients in fp32, through the host: each sends and receives
        each of them twice, less its own part. GPUs that are linked directly take less."""
        return 2 * (gpus - 1) / gpus * 4 * numbers / self._copy_bytes_per_s

    @property
    def _copy_bytes_per_s(self) -> float:
        """Between GPU and host, in the slower direction: as measured, else assumed."""
        measured = self.measured
        copies = [] if measured is None else [measured.device_to_host_bytes_per_s, measured.host_to_device_bytes_per_s]
        return min((rate for rate in copies if rate is not None), default=COPY_BYTES_PER_S)

    @property
    def usable_bytes(self) -> int:
        """What a job can have of it."""
        return self.memory_bytes - DRIVER_BYTES

    @property
    def limit_bytes(self) -> int:
        """What the peak of a job may reach: the usable memory less the margin."""
        return self.usable_bytes - int(MARGIN * self.usable_bytes)

    @property
    def whole_gib(self) -> int:
        """All of its memory, rounded up as `resources.gpu_memory_gib` has it: 32 for an RTX 5090."""
        return math.ceil(self.memory_bytes / 2**30)

    def encode(self) -> str:
        """One line of JSON."""
        measured = None if self.measured is None else self.measured.model_dump()
        facts = {"name": self.name, "memory_bytes": self.memory_bytes, "measured": measured, "count": self.count}
        return json.dumps(facts | {"native_bf16": self.native_bf16, "host_memory_bytes": self.host_memory_bytes})

    @classmethod
    def parse(cls, text: str) -> GpuFacts:
        """What `encode` made. Raises ValueError."""
        try:
            facts = json.loads(text)
            measured = facts.get("measured")
            known = None if measured is None else MeasuredGpu.model_validate(measured)
            host = facts.get("host_memory_bytes")
            return cls(
                str(facts["name"]), int(facts["memory_bytes"]), known, facts.get("native_bf16") is not False,
                None if host is None else int(host), int(facts.get("count", 1)),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{GPU} is {text!r}; it is JSON such as {{"name": "…", "memory_bytes": 34190917632}}'
            ) from error


REFERENCE = GpuFacts("NVIDIA GeForce RTX 5090", 32_607 * 2**20)
"""The GPU that is assumed until a train worker has reported its own."""

_TERA = {
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 3090 Ti": 80.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9,
    "NVIDIA A10": 125.0,
    "NVIDIA A40": 149.7,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 836.0,
    "NVIDIA B200": 2250.0,
}
_TERABYTES = {
    "NVIDIA GeForce RTX 3090": 0.936,
    "NVIDIA GeForce RTX 4090": 1.008,
    "NVIDIA GeForce RTX 5090": 1.792,
    "NVIDIA A100-SXM4-80GB": 2.039,
    "NVIDIA H100 80GB HBM3": 3.35,
    "NVIDIA H200": 4.8,
}
"""Of memory a second, from the same data sheets."""


def peak_flops(name: str) -> float | None:
    """FLOP/s of the GPU with this name; None for one that is not in the table."""
    tera = _TERA.get(name)
    return None if tera is None else tera * 1e12


def memory_bandwidth(name: str) -> float | None:
    """Bytes a second between the GPU's memory and its cores; None for one that is not in the table."""
    terabytes = _TERABYTES.get(name)
    return None if terabytes is None else terabytes * 1e12


def short_name(name: str) -> str:
    """`RTX 5090` for `NVIDIA GeForce RTX 5090`."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")
