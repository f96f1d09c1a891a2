"""The layers of T5, compiled (`tasks/compiled.py`).

What tells graphs apart is whether a row is alone (a size of 1 is never a symbol), whether inputs are padded and, on
CUDA, which widths are multiples of 16: attention lays the others out anew. `warm_up` goes through all those cases.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from transformers import PreTrainedModel

from worker.training.journal import Journal
from worker.training.tasks.compiled import Backend, CompiledLayers
from worker.training.tasks.seq2seq.attention import run_block
from worker.training.tasks.seq2seq.loss import token_loss_sum

# Of the tiny batches of `warm_up`. All different and unlike any size of a model: equal sizes would become one symbol.
# The second of two widths is a multiple of 16.
_ROWS, _INPUTS, _TARGETS = 3, (88, 80), (104, 96)


class CompiledBlocks(CompiledLayers):
    """Those of a model's encoder and decoder."""

    def __init__(self, backend: Backend = "inductor") -> None:
        super().__init__(run_block, backend)


def compile_blocks(model: PreTrainedModel, journal: Journal, backend: Backend = "inductor") -> CompiledBlocks:
    """Compile the layers for training, as `CompiledLayers.warm_up` says. The model must be fused."""
    blocks = CompiledBlocks(backend)
    for stack in (model.encoder, model.decoder):
        assert hasattr(stack, "compiled"), "only a fused stack runs its layers through one function"
        stack.compiled = blocks
    blocks.warm_up(model, journal, partial(warm_up, model, journal))
    return blocks


def warm_up(model: PreTrainedModel, journal: Journal) -> None:
    """Forward and backward over tiny batches of every kind; gradients are left behind."""
    device = model.device
    widths = product(_INPUTS, _TARGETS) if device.type == "cuda" else [(_INPUTS[0], _TARGETS[0])]
    kinds = list(product(widths, (_ROWS, 1), (True, False)))
    for number, ((input_width, target_width), rows, padded) in enumerate(kinds):
        journal.progress(number / len(kinds))
        ids = torch.ones(rows, input_width, dtype=torch.int64, device=device)
        mask = (torch.arange(input_width, device=device) < input_width - 1).long().expand(rows, -1)
        labels = torch.ones(rows, target_width, dtype=torch.int64, device=device)
        token_loss_sum(model, ids, mask if padded else None, labels).backward()
