"""`speed.fused`: T5's GELU and RMS norm as one kernel each. The same formulas; weights and config.json stay.

The stock modules write every intermediate of `0.5 x (1 + tanh(...))` and of `w * (x * rsqrt(mean x²))` to memory and
keep most of them for the backward pass. In fp32 the results agree to rounding. In bf16 the fused kernels compute in
fp32 and round once, where the stock modules round after every operation (GELU) or twice (norm).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.t5.modeling_t5 import T5LayerNorm


class FusedGELU(NewGELUActivation):
    """tanh GELU in one kernel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return F.gelu(input, approximate="tanh")


class FusedT5LayerNorm(T5LayerNorm):
    """RMS norm over the last dimension in one kernel."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., d_model]; the mean of squares is taken in fp32 for bf16 input, as the stock module does."""
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


FUSED: dict[type[nn.Module], type[nn.Module]] = {NewGELUActivation: FusedGELU, T5LayerNorm: FusedT5LayerNorm}


def fuse(model: nn.Module) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many. Other kinds of modules are left alone."""
    return _exchange(model, FUSED)


def unfuse(model: nn.Module) -> int:
    """Undo `fuse`; returns how many modules were changed back."""
    return _exchange(model, {fused: stock for stock, fused in FUSED.items()})


def _exchange(model: nn.Module, kinds: dict[type[nn.Module], type[nn.Module]]) -> int:
    count = 0
    for module in model.modules():
        # Exactly that type: a subclass may compute something else. Parameters and attributes are the same in both,
        # so changing the class is all there is to do, and nothing is copied.
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]
            count += 1
    return count
