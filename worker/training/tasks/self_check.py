"""What tasks ask a model before it trains: rows for it, and the mode in which it answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_LENGTHS = (7, 12)


def short_rows(model: PreTrainedModel) -> list[torch.Tensor]:
    """Two rows of 7 and 12 token numbers that every vocabulary has, none of the first few, which may be special."""
    embedding: Any = model.get_input_embeddings()
    size = int(embedding.weight.shape[0])
    first = torch.arange(max(_LENGTHS), device=model.device) * 7 % max(1, size - 8) + min(8, size - 1)
    return [(first[:length] + place).clamp(max=size - 1) for place, length in enumerate(_LENGTHS)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; afterwards the model is in the mode in which it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
