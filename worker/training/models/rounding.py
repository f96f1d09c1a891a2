"""Floats of a model as the model store holds them, and what cannot be held so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobs.memory_plan import DType
from worker.training.models.layout import reject_tensors

if TYPE_CHECKING:
    import torch

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What is converted, as safetensors and as torch names it; everything that is not a float stays as it is."""
STORED: Mapping[DType, str] = {"bfloat16": "BF16", "float16": "F16"}
HALF_BYTES = 2


@dataclass
class Rounding:
    """Floats become numbers of one type; and what this type cannot hold, by tensor."""

    dtype: DType
    overflow: dict[str, float] = field(default_factory=dict)
    """The largest absolute value of a tensor that has such."""
    underflow: dict[str, int] = field(default_factory=dict)
    """How many numbers of a tensor became 0."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """How many numbers of a tensor are NaN or infinite, before float16 or in bfloat16."""

    def bytes_of(self, name: str, numbers: torch.Tensor) -> memoryview:
        """Of a piece of this tensor, rounded to the nearest (ties to even)."""
        import torch

        rounded = numbers.to(getattr(torch, self.dtype))
        held = numbers if self.dtype == "float16" else rounded  # what float16 cannot hold is told apart
        if broken := held.numel() - int(torch.count_nonzero(torch.isfinite(held))):
            self.not_finite[name] = self.not_finite.get(name, 0) + broken
        if self.dtype == "float16" and numbers.dtype != torch.float16:
            beyond = numbers[torch.isinf(rounded) & torch.isfinite(numbers)]
            if len(beyond):
                self.overflow[name] = max(self.overflow.get(name, 0.0), float(beyond.abs().max()))
            if lost := int(torch.count_nonzero(numbers) - torch.count_nonzero(rounded)):
                self.underflow[name] = self.underflow.get(name, 0) + lost
        content: memoryview = rounded.reshape(-1).view(torch.uint8).numpy().data
        return content

    def refuse(self, source: str) -> None:
        """Raise Rejected (`weights_not_finite`, `weights_overflow`), naming tensors, where a model cannot be stored."""
        reject_tensors(
            "weights_not_finite",
            [f"{name} ({count:,} values)" for name, count in self.not_finite.items()],
            f"of {source} have values that are NaN, or infinite in {self.dtype}",
            hint="the files are damaged, or were published so: get them again, or take another revision or model",
        )
        reject_tensors(
            "weights_overflow",
            [f"{name} (up to {largest:,.0f})" for name, largest in self.overflow.items()],
            f"of {source} have values beyond 65,504, the largest of float16",
            hint="set method.base_dtype: bfloat16, for which a GPU must have compute capability 8.0 or newer (RTX 30, "
            "A100, and newer)",
        )
