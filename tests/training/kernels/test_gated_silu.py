"""SwiGLU's gate against torch's two operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from worker.training.kernels.rms_norm import gated_silu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_and_gradients_are_those_of_torch_bit_for_bit(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    gate, up, given = (torch.randn(3, 7, 40, generator=draw).to(dtype) for _ in range(3))
    inputs = [gate.requires_grad_(), up.requires_grad_()]
    expected, found = F.silu(gate) * up, gated_silu(gate, up)
    assert torch.equal(found, expected)
    wanted = torch.autograd.grad(expected, inputs, given)
    for gradient, other in zip(torch.autograd.grad(found, inputs, given), wanted, strict=True):
        assert torch.equal(gradient, other)


def test_nothing_but_the_inputs_is_kept() -> None:
    inputs = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):  # type: ignore[func-returns-value]
        gated_silu(*inputs)
    assert {each.data_ptr() for each in kept} == {each.data_ptr() for each in inputs}
