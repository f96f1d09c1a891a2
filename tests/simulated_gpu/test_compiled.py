"""Compiled layers on CUDA: attention there asks more of a shape than on a CPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from jobs.spec import LoraMethod
from tests.training.tasks.causal.families import model_of
from tests.training.tasks.seq2seq.comparison import make_model
from worker.training.adapters.lora import Lora
from worker.training.journal import Journal
from worker.training.tasks.causal.compiled import compile_layers
from worker.training.tasks.causal.fused import configure, learned_loss_sum
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.seq2seq.compiled import compile_blocks
from worker.training.tasks.seq2seq.fused import fuse
from worker.training.tasks.seq2seq.loss import token_loss_sum

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
ROWS, WIDTHS = (1, 2, 5), (16, 40, 256)


def test_nothing_is_compiled_after_the_warm_up(tmp_path: Path) -> None:
    """Shapes with widths that are multiples of 16 and others, padded or not, equal or not, and one row alone."""
    model = make_model(gated=True, tied=False).bfloat16()
    model.to(torch.device("cuda"))  # type: ignore[arg-type]  # wrapped by transformers
    fuse(model)
    set_dropout(model, 0.1)
    counters.clear()
    blocks = compile_blocks(model, Journal(tmp_path / "journal.jsonl"), "aot_eager")
    assert blocks.failure is None
    graphs = counters["stats"]["unique_graphs"]
    # Encoder: several rows padded or not, a row alone. Decoder: the same, and whether a row alone is padded.
    # Each for multiples of 16 and for others.
    assert graphs == 14

    for rows, input_width, target_width, padded in product(ROWS, WIDTHS, WIDTHS, (True, False)):
        ids = torch.ones(rows, input_width, dtype=torch.int64, device="cuda")
        labels = torch.ones(rows, target_width, dtype=torch.int64, device="cuda")
        token_loss_sum(model, ids, ids.clone() if padded else None, labels).backward()
        shape = (rows, input_width, target_width, padded)
        assert counters["stats"]["unique_graphs"] == graphs and blocks.failure is None, shape


def test_nothing_is_compiled_after_the_warm_up_of_a_causal_model_with_adapters(tmp_path: Path) -> None:
    model = model_of("qwen2", torch.bfloat16, max_position_embeddings=512)
    model.to(torch.device("cuda"))  # type: ignore[arg-type]  # wrapped by transformers
    configure(model, fused=True, dropout=0.0)
    Lora(LoraMethod(type="lora", rank=4)).inject(model, 0)
    torch._dynamo.reset()
    counters.clear()
    compiled = compile_layers(model, Journal(tmp_path / "journal.jsonl"), "aot_eager")
    assert compiled.failure is None
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 4  # several rows, or one alone; the first layer, whose input needs no gradient, and others

    for rows, width in product(ROWS, (*WIDTHS, 512)):
        ids = torch.ones(rows, width, dtype=torch.int64, device="cuda")
        learned_loss_sum(model, ids, torch.arange(5, device="cuda"), ids[0, :5]).backward()
        assert counters["stats"]["unique_graphs"] == graphs and compiled.failure is None, (rows, width)
