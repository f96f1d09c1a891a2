"""`speed.fused`: modules of T5 exchanged for faster ones, in place. The same formulas; weights and config.json stay.

What is exchanged is a module's class, nothing else: parameters and attributes are the same in both, so nothing is
copied and nothing moves. In fp32 the results agree to rounding. In bf16 GELU and norm compute in fp32 and round once,
where the stock modules, which also keep most intermediates for the backward pass, round after every operation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, T5ForConditionalGeneration
from transformers.activations import NewGELUActivation
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.t5.modeling_t5 import T5Attention, T5Block, T5LayerNorm, T5Stack

from worker.training.kernels.dropout import FusedDropout
from worker.training.kernels.rms_norm import rms_norm
from worker.training.tasks.seq2seq.attention import FusedT5Attention, FusedT5Block
from worker.training.tasks.seq2seq.layout import declares_untied_head
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


PATCHES: dict[Patch, dict[type[nn.Module], type[nn.Module]]] = {
    "gelu": {NewGELUActivation: FusedGELU},
    "norm": {T5LayerNorm: FusedT5LayerNorm},
    "attention": {T5Attention: FusedT5Attention, T5Block: FusedT5Block, T5Stack: FusedT5Stack},
    "dropout": {nn.Dropout: FusedDropout},
    "head": {nn.Linear: FusedHead},
}
"""Each can be switched by itself. `head` concerns the module `lm_head` alone."""
ALL: tuple[Patch, ...] = tuple(PATCHES)


def fuse(model: nn.Module, patches: Collection[Patch] = ALL) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many. Other kinds of modules are left alone."""
    return sum(_exchange(model, patch, PATCHES[patch]) for patch in patches)


def unfuse(model: nn.Module, patches: Collection[Patch] = ALL) -> int:
    """Undo `fuse`; returns how many modules were changed back."""
    return sum(_exchange(model, patch, {fused: stock for stock, fused in PATCHES[patch].items()}) for patch in patches)


def bare(config: Mapping[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model that config.json describes, on the device in use. Raises whatever transformers does.

    Whether the head is tied is as config.json says, from which transformers departs.
    """
    kind = CONFIG_MAPPING[config["model_type"]]
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(kind.from_dict(dict(config)), dtype=dtype)
    if getattr(model.config, "decoder_start_token_id", None) is None:
        raise ValueError("it has no decoder_start_token_id, with which every target begins")
    if isinstance(model, T5ForConditionalGeneration) and declares_untied_head(config):
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def set_dropout(model: nn.Module, rate: float) -> None:
    """Every dropout of the model, those inside attention (a number there, not a module) included."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        elif isinstance(module, T5Attention):
            module.dropout = rate


def _exchange(model: nn.Module, patch: Patch, kinds: dict[type[nn.Module], type[nn.Module]]) -> int:
    count = 0
    for name, module in model.named_modules():
        # Exactly that type: a subclass may compute something else.
        if type(module) in kinds and (patch != "head" or name == "lm_head"):
            module.__class__ = kinds[type(module)]
            count += 1
    return count
