"""`speed.fused`: cheaper dropout, layers without padding, in place; and the check that a row is the same beside others.

Norms and GELU of encoders are single kernels of torch already. Any encoder may come that transformers knows; what this
code takes for granted of it is checked on the model itself, before it trains.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from jobs.text.units import format_share
from worker.training.kernels.dropout import FusedDropout
from worker.training.tasks.classification.packed import logits_of, pack
from worker.training.tasks.dropout import set_dropout
from worker.training.tasks.self_check import SelfCheck, short_rows

_CHECK = SelfCheck(
    "an encoder", "models of the families BERT, RoBERTa, DeBERTa, ModernBERT and DistilBERT are known to work"
)
_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-3, torch.float64: 1e-6}
"""Difference of logits, relative to the largest, and of a token's last hidden states, relative to their norm.

In bf16, 24 layers and two kernels of attention differ by up to 0.03 in both. What sees padding changes logits by as
little (ConvBERT 0.01), but the hidden states of the tokens beside it by more (0.09).
"""


def configure(model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
    """As `Task.configure`. Raises Rejected (`self_check_failed`)."""
    if dropout is not None:
        set_dropout(model, dropout)
    if fused:
        fuse(model)
    if model.device.type != "meta":
        check_rows(model)


def fuse(model: nn.Module) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many."""
    found = [module for module in model.modules() if type(module) is nn.Dropout]
    for module in found:
        module.__class__ = FusedDropout
    return len(found) + pack(model)


def check_rows(model: PreTrainedModel) -> None:
    """Refuse `self_check_failed`: rows padded together must have the logits that each has by itself."""
    rows = short_rows(model)
    width = max(map(len, rows))
    pad = int(model.config.pad_token_id or 0)
    ids = torch.stack([F.pad(row, (0, width - len(row)), value=pad) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
    with _CHECK.asking(model):
        alone = torch.cat([model(input_ids=row[None]).logits for row in rows]).float()
        together = logits_of(model, ids, mask, np.array([len(row) for row in rows])).float()
        padded = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        for number, row in enumerate(rows):
            hidden = model.base_model(input_ids=row[None]).last_hidden_state[0].float()
            difference = (padded[number, : len(row)] - hidden).norm(dim=-1) / hidden.norm(dim=-1).clamp(min=1e-6)
            if not float(difference.max()) <= _TOLERANCE[model.dtype]:
                place = int(difference.argmax()) + 1
                raise _CHECK.refused(
                    model,
                    f"the hidden states of token {place} of {len(row)} are others by "
                    f"{format_share(float(difference.max()))} beside padding",
                )
    bound = _TOLERANCE[model.dtype] * max(0.1, float(alone.abs().max()))
    if not float((alone - together).abs().max()) <= bound:
        raise _CHECK.refused(
            model,
            f"the logits of a row are {alone[0, :3].tolist()} by itself and {together[0, :3].tolist()} beside another",
        )
