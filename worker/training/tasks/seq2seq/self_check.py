"""A model is set up for training, and asked whether it then computes what it computes by itself.

Any encoder-decoder may come that transformers knows: one that begins targets otherwise, sees padding, adds to its
loss. T5 and mT5 are proven in the tests, and are not asked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from jobs.text.units import format_number
from worker.training.kernels.head_loss import IGNORED
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.self_check import SelfCheck
from worker.training.tasks.seq2seq.fused import fuse, has_t5_stacks
from worker.training.tasks.seq2seq.loss import token_loss_sum

_CHECK = SelfCheck("an encoder-decoder", "models of the families T5, mT5, BART and Pegasus are known to work")
_LENGTHS = ((7, 9), (12, 5))
"""Of the rows: input, target."""
_TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative difference of the loss."""


def configure(model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
    """As `Task.configure`. Raises Rejected (`self_check_failed`)."""
    if dropout is not None:
        set_dropout(model, dropout)
    asked = model.device.type != "meta" and not has_t5_stacks(model)
    expected = _losses(model, alone=True) if asked else []
    if fused:
        fuse(model)
    found = _losses(model, alone=False) if asked else []
    if expected and not abs(sum(found) - sum(expected)) <= _TOLERANCE[model.dtype] * abs(sum(expected)):
        raise _CHECK.refused(
            model,
            f"the loss of two rows is {format_number(sum(expected), 6)} by itself, each alone, and "
            f"{format_number(sum(found), 6)} as they are "
            "trained, one beside the other",
        )


def _losses(model: PreTrainedModel, *, alone: bool) -> list[float]:
    """Sums over the target tokens of two rows: each alone, as transformers has it, or both in a batch, as we train."""
    rows = _rows(model)
    with _CHECK.asking(model):
        if alone:
            counts = [len(target) for _, target in rows]
            found = [model(input_ids=input[None], labels=target[None], use_cache=False).loss for input, target in rows]
            return [float(loss) * count for loss, count in zip(found, counts, strict=True)]
        widths = [max(sizes) for sizes in zip(*_LENGTHS, strict=True)]
        pad = int(model.config.pad_token_id or 0)
        inputs = torch.stack([F.pad(input, (0, widths[0] - len(input)), value=pad) for input, _ in rows])
        mask = torch.stack([F.pad(torch.ones_like(input), (0, widths[0] - len(input))) for input, _ in rows])
        labels = torch.stack([F.pad(target, (0, widths[1] - len(target)), value=IGNORED) for _, target in rows])
        return [float(token_loss_sum(model, inputs, mask, labels))]


def _rows(model: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token numbers that every vocabulary has, none of the first few, which may be special."""
    embedding: Any = model.get_input_embeddings()
    size = int(embedding.weight.shape[0])
    longest = max(size for sizes in _LENGTHS for size in sizes)
    first = torch.arange(longest, device=model.device) * 7 % max(1, size - 9) + min(8, size - 1)
    return [(first[:input], first[:target].flip(0)) for input, target in _LENGTHS]
