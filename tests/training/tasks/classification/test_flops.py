"""FLOPs are those that torch counts, for every family."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.training.tasks.classification.families import FAMILIES, config_of, model_of
from worker.training.tasks.classification.layout import ClassFlops


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_that_torch_counts(family: str) -> None:
    model = model_of(family).eval()
    if family != "deberta-v2":  # which has but one
        model.set_attn_implementation("eager")  # torch does not count its own for CPUs
    found, counted = [], []
    for length in (24, 40):
        ids = torch.arange(length)[None] + 10
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(input_ids=ids)
        counted.append(counter.get_total_flops())
        lengths = np.array([length])
        flops = ClassFlops.of_config(config_of(family))
        found.append(flops.forward(lengths, np.array([1])))
        assert flops.rows(lengths, np.array([3])) == 3 * found[-1]
    assert np.allclose(found, counted, rtol=0.15), (found, counted)
    assert found[1] - found[0] == pytest.approx(counted[1] - counted[0], rel=0.1)
    assert ClassFlops.recomputed(config_of(family), 1).forward(lengths, lengths) < found[-1]
    assert ClassFlops.recomputed(config_of(family), 0).forward(lengths, lengths) == 0
