"""Adapters in every family of causal models: gradients are those of plain peft, however a step is cut."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from jobs.errors import Rejected
from jobs.spec import LoraMethod
from tests.training.tasks.causal import test_exactness
from tests.training.tasks.causal.families import FAMILIES, model_of
from tests.training.tasks.causal.test_exactness import ROWS, gradients, plain
from worker.training.adapters.lora import Lora
from worker.training.dataset.data import Rows
from worker.training.loop import accumulate
from worker.training.tasks.causal.batches import CausalLimit
from worker.training.tasks.causal.fused import configure

rows, _norms_in_float64 = test_exactness.rows, test_exactness._norms_in_float64
METHOD = Lora(LoraMethod(type="lora", rank=4))


@pytest.mark.usefixtures("_norms_in_float64")
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt2"])
def test_a_step_is_that_of_plain_peft_however_it_is_cut(family: str, rows: Rows) -> None:
    model = model_of(family).train()
    configure(model, fused=True, dropout=0.0)
    theirs = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, lora_alpha=4, target_modules="all-linear")).double()
    METHOD.inject(model, 0)
    torch.nn.Module.double(model).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
                theirs.get_parameter(f"base_model.model.{name}").copy_(parameter)
    expected, wanted = plain(theirs.train(), rows)  # type: ignore[arg-type]  # it acts as the model in it
    assert wanted and all("lora_" in name for name in wanted)
    bound = 1e-7 if family == "gemma2" else 1e-12  # its attention takes the softmax in fp32, whatever the dtype
    for micro_batch in (1, 3, ROWS):
        model.zero_grad()
        loss = accumulate(model, CausalLimit.of(rows, micro_batch).batches(rows, [np.arange(ROWS)], 0))
        assert float(loss) == pytest.approx(expected, rel=bound)
        found = {f"base_model.model.{name}": each for name, each in gradients(model).items()}
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            difference = float((found[name] - gradient).norm())
            assert difference <= bound * max(1e-3, float(gradient.norm())), (name, micro_batch)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(Rejected) as caught:
        METHOD.inject(model_of("gpt2"), 0)  # its layers are of another class
    assert caught.value.detail_code == "no_such_target"
