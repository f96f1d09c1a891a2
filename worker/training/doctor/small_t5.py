"""A T5 of two layers a stack, of random weights, for comparisons; and rows for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

from worker.training.kernels.head_loss import IGNORED
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.batches import PairBatch

VOCABULARY = 4096
_SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_heads": 16},  # FLAN-T5-large's layers
    "cpu": {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_heads": 4},
}
INPUT_LENGTHS, TARGET_LENGTHS = (37, 64, 11, 52), (96, 43, 80, 17)


def make_model(device: torch.device, dtype: torch.dtype) -> T5ForConditionalGeneration:
    """In training mode, without dropout. The same on every call: weights are rounded to bf16 first."""
    config = builtin.CONFIG | _SIZES[device.type] | {"vocab_size": VOCABULARY, "dropout_rate": 0.0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = T5ForConditionalGeneration(T5Config(**config))
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.02)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms: no 1 behind which an error could hide
                    parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
    model.bfloat16().to(device=device, dtype=dtype)  # type: ignore[call-arg]  # wrapped by transformers
    model.train()
    return model


def draw_batch() -> PairBatch:
    """Four padded rows; the same on every call. On the CPU, as batches are."""
    generator = torch.Generator().manual_seed(4)

    def tokens(lengths: tuple[int, ...], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
        inside = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return drawn.masked_fill(~inside, fill), inside.long()

    ids, mask = tokens(INPUT_LENGTHS, 0)
    labels, _ = tokens(TARGET_LENGTHS, IGNORED)
    return PairBatch(ids, mask, labels, sum(TARGET_LENGTHS), np.arange(len(INPUT_LENGTHS)), input_padded=True)
