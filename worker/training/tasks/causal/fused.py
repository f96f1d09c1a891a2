"""`speed.fused`: modules of causal models exchanged for faster ones, in place, and the check that all is as it was.

What is exchanged is a module's class, nothing else: parameters and attributes are the same in both. Any family may
come that transformers knows; what this code takes for granted of it is checked on the model itself, before it trains.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from jobs.errors import Rejected
from jobs.text.units import format_number
from worker.training.kernels.dropout import FusedDropout
from worker.training.kernels.gated_silu import gated_silu
from worker.training.kernels.gradient_sums import SummedEmbedding
from worker.training.kernels.rms_norm import rms_norm
from worker.training.tasks.causal.loss import learned_loss_sum
from worker.training.tasks.dropout import set_dropout
from worker.training.tasks.self_check import SelfCheck, short_rows

NORMS = (
    "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm", "Olmo2RMSNorm", "SmolLM3RMSNorm",
)  # fmt: skip
"""Classes of transformers that all compute weight · x / sqrt(mean square + variance_epsilon)."""
GATES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Those that all compute down_proj(act_fn(gate_proj(x)) · up_proj(x))."""
_CHECK = SelfCheck(
    "a causal model", "models of the families Llama, Mistral, Qwen2, Qwen3, Gemma and Phi-3 are known to work"
)
_TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative difference of the loss. Stock modules round after every operation, and take norms in fp32 in any case."""


def configure(model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
    """As `Task.configure`. Raises Rejected (`self_check_failed`)."""
    if dropout is not None:
        set_dropout(model, dropout)
    expected = None if model.device.type == "meta" else stock_loss(model)
    if fused:
        fuse(model)
    if expected is not None:
        check_loss(model, expected)


def fuse(model: nn.Module) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many."""
    count = 0
    for module in model.modules():
        kind = _fused(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever mypy makes of Module
        if kind is not None and (not issubclass(kind, _FusedGate) or _is_silu(module.act_fn)):
            module.__class__ = kind
            count += 1
    return count


@functools.cache
def _fused(kind: Any) -> type[nn.Module] | None:
    """What takes the place of a class; None: it stays."""
    if kind is nn.Dropout:
        return FusedDropout
    if kind is nn.Embedding:  # exactly: others do more, such as scale
        return SummedEmbedding
    if kind.__module__.startswith("transformers."):
        for names, fused in ((NORMS, _FusedNorm), (GATES, _FusedGate)):
            if kind.__name__ in names:
                return type(f"Fused{kind.__name__}", (fused, kind), {})
    return None


def _is_silu(activation: Any) -> bool:
    return type(activation) in (nn.SiLU, SiLUActivation)


class _FusedNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _FusedGate(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))
        return down


# -- the check -------------------------------------------------------------------------------------------------------


def stock_loss(model: PreTrainedModel) -> list[float]:
    """Of two short rows, each by itself, by the model's own forward pass: of all their tokens but the first."""
    with _CHECK.asking(model):
        found = []
        for ids in short_rows(model):
            logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            found.append(float(F.cross_entropy(logits.double(), ids[1:], reduction="sum")))
        return found


def check_loss(model: PreTrainedModel, expected: list[float]) -> None:
    """Refuse `self_check_failed`: the rows padded together, as training takes them, must have the same losses."""
    rows = short_rows(model)
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
    with _CHECK.asking(model):
        for number, (row, loss) in enumerate(zip(rows, expected, strict=True)):
            places = number * width + torch.arange(len(row) - 1, device=ids.device)
            found = float(learned_loss_sum(model, ids, places, row[1:]))
            if model.dtype == torch.float16 and not math.isfinite(loss):
                raise Rejected(
                    f"model: {type(model).__name__} does not work in float16: the loss of {len(row)} tokens is {loss}, "
                    "since what the model computes exceeds the range of float16",
                    code="no_float16",
                    param="method.base_dtype",
                    hint="set method.base_dtype: bfloat16, for which a GPU must have compute capability 8.0 or newer "
                    "(RTX 30, A100, and newer); or take a model of another family",
                )
            if not abs(found - loss) <= _TOLERANCE[model.dtype] * abs(loss):
                raise _CHECK.refused(
                    model,
                    f"the loss of a row is {format_number(loss, 6)} by itself and {format_number(found, 6)} "
                    "beside another",
                )
