"""What a config.json must say for its weights to be known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobs.errors import Rejected
from tests.training.conftest import CONFIG
from worker.training.tasks.seq2seq.layout import t5_shapes


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_start_token_id", 10**12),
        ("decoder_start_token_id", True),
        ("pad_token_id", -7),
        ("dropout_rate", math.nan),
        ("dropout_rate", "0.1"),
        ("layer_norm_epsilon", math.inf),
    ],
)
def test_numbers_that_would_fail_in_training_are_refused(key: str, value: Any) -> None:
    assert t5_shapes(CONFIG | {"pad_token_id": None})
    with pytest.raises(Rejected, match=key):
        t5_shapes(CONFIG | {key: value})
