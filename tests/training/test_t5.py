"""Fused kernels: the same function and the same gradients as the stock modules, and undone without a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.training.conftest import tiny_model
from worker.training.data import PreparedDataset
from worker.training.loop import accumulate
from worker.training.t5 import FusedGELU, FusedT5LayerNorm, fuse, unfuse


def outputs_and_gradients(module: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    module = module.to(dtype)
    generator = torch.Generator().manual_seed(1)
    values = (4 * torch.randn(64, 48, generator=generator)).to(dtype).requires_grad_()
    weights = torch.randn(64, 48, generator=generator).to(dtype)
    result = module(values)
    (result * weights).sum().backward()
    assert values.grad is not None
    return [
        result.detach(),
        values.grad,
        *(parameter.grad for parameter in module.parameters() if parameter.grad is not None),
    ]


# T5LayerNorm takes its mean of squares in fp32 even for float64 input, hence the wider bound for float64 there. In bf16
# both are within a few roundings (2^-8 each) of the exact value.
@pytest.mark.parametrize(
    ("stock", "dtype", "bound"),
    [
        (NewGELUActivation, torch.float64, 1e-12),
        (NewGELUActivation, torch.float32, 1e-5),
        (NewGELUActivation, torch.bfloat16, 0.05),
        (T5LayerNorm, torch.float64, 1e-6),
        (T5LayerNorm, torch.float32, 1e-5),
        (T5LayerNorm, torch.bfloat16, 0.05),
    ],
)
def test_fused_and_stock_modules_agree(stock: type[nn.Module], dtype: torch.dtype, bound: float) -> None:
    def make() -> nn.Module:
        module = stock(48) if stock is T5LayerNorm else stock()
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        return module

    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    fused = make()
    assert fuse(fused) == 1
    for one, other in zip(outputs_and_gradients(plain, dtype), outputs_and_gradients(fused, dtype), strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def test_fused_bf16_is_at_least_as_near_to_the_exact_value_as_the_stock_modules() -> None:
    for stock in (NewGELUActivation, T5LayerNorm):
        make = (lambda: T5LayerNorm(48)) if stock is T5LayerNorm else NewGELUActivation
        exact, plain, fused = (module_outputs(make(), kind) for kind in ("exact", "plain", "fused"))
        assert (fused - exact).abs().mean() <= (plain - exact).abs().mean()


def module_outputs(module: nn.Module, kind: str) -> torch.Tensor:
    if kind == "fused":
        fuse(module)
    module = module.to(torch.float64 if kind == "exact" else torch.bfloat16)
    values = torch.randn(256, 48, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    with torch.no_grad():
        result: torch.Tensor = module(values.double() if kind == "exact" else values)
    return result.double()


def test_a_whole_model_gives_the_same_loss_and_gradient(dataset: PreparedDataset) -> None:
    model = tiny_model(dropout_rate=0.0).train()
    plain = accumulate(model, dataset.train, np.arange(8), 8, 0).loss
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    assert fuse(model) == 2 + 3 + 4  # 2 GELUs; 2 norms and 1 at the end in the encoder, 3 and 1 in the decoder
    fused = accumulate(model, dataset.train, np.arange(8), 8, 0).loss
    torch.testing.assert_close(plain, fused)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_it_is_undone_without_a_trace_and_leaves_other_kinds_alone() -> None:
    model = tiny_model()
    before = [type(module) for module in model.modules()], model.config.to_dict()
    fuse(model)
    kinds = {type(module) for module in model.modules()}
    assert {FusedGELU, FusedT5LayerNorm} <= kinds and not {NewGELUActivation, T5LayerNorm} & kinds
    assert model.config.to_dict() == before[1]
    unfuse(model)
    assert [type(module) for module in model.modules()] == before[0]
    assert fuse(nn.Sequential(nn.GELU(), nn.LayerNorm(3), nn.RMSNorm(3))) == 0
