"""The rate of every dropout of a model, those that are numbers and no modules included."""

from __future__ import annotations

from torch import nn

_RATES = ("attention_dropout", "dropout", "dropout_prob", "attention_probs_dropout_prob", "activation_dropout")
"""Attributes of modules that hold a rate as a number."""


def set_dropout(model: nn.Module, rate: float) -> None:
    """Of all modules; config.json stays."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in _RATES:
            now = getattr(module, name, None)
            if isinstance(now, int | float) and not isinstance(now, bool):
                setattr(module, name, rate)
