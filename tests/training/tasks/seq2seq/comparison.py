"""T5 models and batches for comparisons, and how far the gradients of ours are from those of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from tests.training.conftest import CONFIG, tiny_model
from worker.training.tasks.seq2seq.compiled import CompiledBlocks
from worker.training.tasks.seq2seq.loss import token_loss_sum

Tensors = dict[str, torch.Tensor]


INPUT_LENGTHS, TARGET_LENGTHS, WIDTHS = (7, 16, 1, 12), (24, 3, 17, 20), (16, 24)


def make_model(*, gated: bool, tied: bool) -> T5ForConditionalGeneration:
    """Two layers each, without dropout, float64; every parameter drawn, so that none hides behind a zero or a one."""
    shape = {"num_layers": 2, "num_decoder_layers": 2, "dropout_rate": 0.0}
    form = {"feed_forward_proj": "gated-gelu" if gated else "relu", "tie_word_embeddings": tied}
    config = T5Config(**CONFIG | shape | form)
    model = T5ForConditionalGeneration(config) if tied else tiny_model(**config.to_diff_dict())
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * drawn if parameter.ndim == 1 else 0.1 * drawn)
    assert (model.lm_head.weight is model.shared.weight) is tied
    assert model.config.scale_decoder_outputs is tied
    model.double().train()
    return model


def make_batch(padded: bool) -> dict[str, torch.Tensor]:
    """[4, 16] inputs and [4, 24] labels; `padded`: of various lengths."""
    generator = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(3, CONFIG["vocab_size"], (4, width), generator=generator) for width in WIDTHS)
    inside = torch.arange(WIDTHS[0]) < torch.tensor(INPUT_LENGTHS)[:, None]
    counted = torch.arange(WIDTHS[1]) < torch.tensor(TARGET_LENGTHS)[:, None]
    if not padded:
        return {"input_ids": ids, "labels": labels}
    return {
        "input_ids": ids.masked_fill(~inside, 0),
        "attention_mask": inside.long(),
        "labels": labels.masked_fill(~counted, -100),
    }


def by_transformers(model: T5ForConditionalGeneration, batch: Tensors) -> Tensors:
    """Loss and gradients of the model as it is shipped."""
    logits = model(**batch).logits
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).to(torch.float64), labels, ignore_index=-100, reduction="sum")
    return with_gradients(model, loss / 50)


def by_us(model: T5ForConditionalGeneration, batch: Tensors) -> Tensors:
    return with_gradients(
        model, token_loss_sum(model, batch["input_ids"], batch.get("attention_mask"), batch["labels"]) / 50
    )


def with_gradients(model: nn.Module, loss: torch.Tensor) -> Tensors:
    loss.backward()
    found = {
        name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    assert found.keys() == dict(model.named_parameters()).keys()
    model.zero_grad()
    return found | {"loss": loss.detach().double()}


def distances(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Of each tensor, relative to its norm."""
    assert found.keys() == expected.keys()
    return {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


SHAPES = [(4, 8, 16), (1, 24, 8), (2, 16, 16), (7, 40, 8), (32, 8, 8), (8, 32, 64), (1, 8, 8), (3, 88, 104)]
"""Rows, input width, target width."""


def draw_batch(rows: int, inputs: int, targets: int, *, padded: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(rows + inputs + targets)
    ids, labels = (
        torch.randint(3, CONFIG["vocab_size"], (rows, width), generator=generator) for width in (inputs, targets)
    )
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    mask[:, inputs - rows % 5 - 1 :] = 0
    labels[0, targets // 2 :] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def run_by(model: Any, blocks: CompiledBlocks | None) -> None:
    for stack in (model.encoder, model.decoder):
        stack.compiled = blocks
