"""T5 on CUDA: the fused model against the stock one, nothing that waits for the device, compiled layers.

Each test says what it would show. `LONGHAUL_TEST_DEVICE=cpu` runs them there (minutes, for the compiled one).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import T5ForConditionalGeneration

from tests.training.tasks.seq2seq.comparison import (
    SHAPES,
    Tensors,
    by_transformers,
    by_us,
    distances,
    draw_batch,
    make_batch,
    make_model,
    run_by,
)
from worker.training.journal import Journal
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.seq2seq.compiled import compile_blocks
from worker.training.tasks.seq2seq.fused import fuse
from worker.training.tasks.seq2seq.loss import token_loss_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
DEVICE = torch.device(os.environ.get("LONGHAUL_TEST_DEVICE", "cuda"))


def model_on_device() -> T5ForConditionalGeneration:
    model = make_model(gated=True, tied=False).bfloat16()
    model.to(DEVICE)  # type: ignore[arg-type]  # wrapped by transformers
    return model


def on_device(batch: Tensors) -> Tensors:
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


@pytest.mark.parametrize("padded", [True, False])
def test_the_fused_model_is_as_near_to_the_truth_as_the_stock_one(padded: bool) -> None:
    """Shows that the kernels of a GPU (attention with a bias, norm, GELU) give the same gradients."""
    model, batch = model_on_device(), on_device(make_batch(padded))
    exact = by_transformers(copy.deepcopy(model).double(), batch)
    stock = distances(by_transformers(model, batch), exact)
    fuse(model)
    ours = distances(by_us(model, batch), exact)
    assert sum(ours.values()) < 1.5 * sum(stock.values()) and max(ours.values()) < 0.1


@pytest.mark.no_numbers
@pytest.mark.parametrize("padded", [True, False])
def test_the_host_never_waits_for_the_gpu(padded: bool, refuse_waits: Callable[[], None]) -> None:
    """Shows by CUDA's own count of synchronizations that forward and backward only queue work."""
    model = model_on_device()
    batch = on_device(make_batch(padded))
    set_dropout(model, 0.1)
    fuse(model)

    def forward_and_backward() -> None:
        token_loss_sum(model, batch["input_ids"], batch.get("attention_mask"), batch["labels"]).backward()

    forward_and_backward()
    refuse_waits()
    forward_and_backward()


def test_compiled_layers_serve_every_shape(tmp_path: Path) -> None:
    """Shows that layers compile on a GPU, once for all shapes, and are as exact as eager ones."""
    model = model_on_device()
    fuse(model)
    blocks = compile_blocks(model, Journal(tmp_path / "journal.jsonl"))
    assert blocks.failure is None
    graphs = counters["stats"]["unique_graphs"]
    for shape in SHAPES:
        for padded in (True, False):
            batch = on_device(draw_batch(*shape, padded=padded))
            found = by_us(model, batch)
            run_by(model, None)
            assert max(distances(found, by_us(model, batch)).values()) < 0.1
            run_by(model, blocks)
    assert counters["stats"]["unique_graphs"] == graphs and blocks.failure is None
