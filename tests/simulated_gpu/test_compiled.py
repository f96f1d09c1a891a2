"""Compiled layers on CUDA: attention there asks more of a shape than on a CPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.training.tasks.seq2seq.comparison import make_model
from worker.training.journal import Journal
from worker.training.tasks.seq2seq.compiled import compile_blocks
from worker.training.tasks.seq2seq.fused import fuse, set_dropout
from worker.training.tasks.seq2seq.loss import token_loss_sum

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
ROWS, WIDTHS = (1, 2, 5, 8), (8, 16, 40, 64, 256)


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
