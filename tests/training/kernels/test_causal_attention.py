"""The CPU's own attention against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from worker.training.kernels import causal_attention as kernel
from worker.training.kernels.causal_attention import causal_attention


def of_torch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("piece", [1, 2**19])
def test_results_and_gradients_are_those_of_torch(
    heads: int, shared: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_PIECE", piece)
    draw = torch.Generator().manual_seed(0)
    query, key, value, given = (
        torch.randn(3, count, 11, width, dtype=torch.float64, generator=draw)
        for count, width in ((heads, 8), (shared, 8), (shared, 5), (heads, 5))
    )
    inputs = [each.requires_grad_() for each in (query, key, value)]
    expected = of_torch(query, key, value, 0.3)
    found = causal_attention(query, key, value, 0.3)
    assert found.shape == (3, 11, heads, 5) and found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    wanted = torch.autograd.grad(expected, inputs, given.transpose(1, 2))
    for gradient, other in zip(torch.autograd.grad(found, inputs, given.transpose(1, 2)), wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-13)


def test_bf16_is_as_exact_as_scores_rounded_to_it() -> None:
    draw = torch.Generator().manual_seed(1)
    exact = [torch.randn(2, 4, 64, 32, generator=draw, dtype=torch.float64) for _ in range(3)]
    rounded = [each.bfloat16() for each in exact]
    expected = of_torch(rounded[0].double(), rounded[1].double(), rounded[2].double(), 32**-0.5)
    found = causal_attention(rounded[0], rounded[1], rounded[2], 32**-0.5)
    assert found.dtype == torch.bfloat16
    assert float((found - expected).norm() / expected.norm()) < 0.01


def test_nothing_but_the_inputs_is_kept() -> None:
    inputs = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):  # type: ignore[func-returns-value]
        causal_attention(inputs[0], inputs[1], inputs[2], 0.25)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in inputs}
