"""RMS norm in pieces: torch's own function and gradients, whatever the shape and however many pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from worker.training.kernels.rms_norm import rms_norm

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}


def of_torch(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(values, weight.shape, weight, epsilon)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", [(48,), (1, 48), (2, 3, 48), (3, 700, 512), (5, 2**16), (2, 2**17 + 8), (0, 48)])
def test_value_and_gradients_are_those_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

    values, weight, gradient = 3 * draw(*shape), 1 + 0.3 * draw(shape[-1]), draw(*shape)
    results = []
    for function in (rms_norm, of_torch):
        x, w = values.clone().requires_grad_(), weight.clone().requires_grad_()
        normed = function(x, w, 1e-6)
        normed.backward(gradient)
        assert normed.dtype == dtype and normed.shape == shape
        assert x.grad is not None and w.grad is not None
        results.append([normed.detach(), x.grad, w.grad])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype == dtype
        assert float((one - other).double().norm()) <= BOUNDS[dtype] * float(other.double().norm())


def test_gradients_of_any_layout() -> None:
    values = torch.randn(4, 6, 16, dtype=torch.float64).transpose(0, 1).requires_grad_()
    weight = torch.rand(16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (values, weight))


def test_without_gradients_only_the_value_is_made() -> None:
    values, weight = torch.randn(8, 16), torch.rand(16)
    with torch.no_grad():
        assert rms_norm(values, weight, 1e-6).grad_fn is None
    assert torch.equal(values, values.clone()) and rms_norm(values, weight, 1e-6).shape == values.shape
