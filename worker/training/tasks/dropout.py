"""The rate of every dropout of a model, those that are numbers and no modules included."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig

_RATE = re.compile(r"dropout|pdrop$|drop_prob$")
"""In the names of rates: `attention_dropout`, `hidden_dropout_prob`, `resid_pdrop`; `layerdrop` skips layers."""


def set_dropout(model: nn.Module, rate: float) -> None:
    """In modules, their attributes, and the configs that some read in their forward pass; config.json stays."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = rate
        _set_rates(module, rate)
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            _set_rates(config, rate)


def _set_rates(holder: Any, rate: float) -> None:
    for name, value in vars(holder).items():
        if _RATE.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(holder, name, rate)
