"""`speed.fused`: modules of T5 exchanged for faster ones, in place. The same formulas; weights and config.json stay.

mT5's modules are T5's under other names. Of other families only dropout and tanh GELU are exchanged.

What is exchanged is a module's class, nothing else: parameters and attributes are the same in both, so nothing is
copied and nothing moves. In fp32 the results agree to rounding. In bf16 GELU and norm compute in fp32 and round once,
where the stock modules, which also keep most intermediates for the backward pass, round after every operation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Block, MT5LayerNorm, MT5Stack
from transformers.models.t5.modeling_t5 import T5Attention, T5Block, T5LayerNorm, T5Stack

from worker.training.kernels.dropout import FusedDropout
from worker.training.kernels.rms_norm import rms_norm
from worker.training.tasks.seq2seq.attention import FusedT5Attention, FusedT5Block
from worker.training.tasks.seq2seq.loss import FusedHead
from worker.training.tasks.seq2seq.stack import FusedT5Stack

Patch = Literal["gelu", "norm", "attention", "dropout", "head"]


class FusedGELU(NewGELUActivation):
    """tanh GELU in one kernel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return F.gelu(input, approximate="tanh")


class FusedT5LayerNorm(T5LayerNorm):
    """RMS norm over the last dimension in one kernel."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., d_model]; the mean of squares is taken in fp32 for bf16 input, as the stock module does."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class FusedMT5LayerNorm(FusedT5LayerNorm, MT5LayerNorm):
    """Of an mT5."""


class FusedMT5Attention(FusedT5Attention, MT5Attention):  # type: ignore[misc]  # another config class
    """Of an mT5."""


class FusedMT5Block(FusedT5Block, MT5Block):
    """Of an mT5."""


class FusedMT5Stack(FusedT5Stack, MT5Stack):  # type: ignore[misc]  # as above
    """Of an mT5."""


PATCHES: dict[Patch, dict[type[nn.Module], type[nn.Module]]] = {
    "gelu": {NewGELUActivation: FusedGELU},
    "norm": {T5LayerNorm: FusedT5LayerNorm, MT5LayerNorm: FusedMT5LayerNorm},
    "attention": {
        T5Attention: FusedT5Attention,
        T5Block: FusedT5Block,
        T5Stack: FusedT5Stack,
        MT5Attention: FusedMT5Attention,
        MT5Block: FusedMT5Block,
        MT5Stack: FusedMT5Stack,
    },
    "dropout": {nn.Dropout: FusedDropout},
    "head": {nn.Linear: FusedHead},
}
"""Each can be switched by itself. `head` concerns the module `lm_head` of a T5 or mT5 alone."""
ALL: tuple[Patch, ...] = tuple(PATCHES)


def fuse(model: nn.Module, patches: Collection[Patch] = ALL) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many. Other kinds of modules are left alone."""
    return sum(_exchange(model, patch, PATCHES[patch]) for patch in patches)


def unfuse(model: nn.Module, patches: Collection[Patch] = ALL) -> int:
    """Undo `fuse`; returns how many modules were changed back."""
    return sum(_exchange(model, patch, {fused: stock for stock, fused in PATCHES[patch].items()}) for patch in patches)


def has_t5_stacks(model: nn.Module) -> bool:
    """Whether encoder and decoder are those of a T5 or mT5, fused or not."""
    return isinstance(getattr(model, "encoder", None), T5Stack | MT5Stack)


def _exchange(model: nn.Module, patch: Patch, kinds: dict[type[nn.Module], type[nn.Module]]) -> int:
    count = 0
    if patch == "head" and not has_t5_stacks(model):
        return 0
    for name, module in model.named_modules():
        # Exactly that type: a subclass may compute something else.
        if type(module) in kinds and (patch != "head" or name == "lm_head"):
            module.__class__ = kinds[type(module)]
            count += 1
    return count
