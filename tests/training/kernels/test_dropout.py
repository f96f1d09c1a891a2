"""Cheap random numbers on the CPU: the rate asked for, the same for the same seed, and a mean that stays."""

from __future__ import annotations

import pytest
import torch

from worker.training.kernels.dropout import FusedDropout, dropout, keep

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_rate_is_met_and_the_mean_stays(rate: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mask = keep(torch.empty(1000, 1001, dtype=dtype), rate)
    assert mask.shape == (1000, 1001) and mask.dtype == dtype
    assert len(mask.unique()) == 2 and mask.min() == 0
    deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(float((mask == 0).double().mean()) - rate) < 4 * deviation
    assert float(mask.max()) == pytest.approx(1 / (1 - rate), rel=2**-8 if dtype == torch.bfloat16 else 2e-4)


def test_numbers_cut_out_of_the_same_64_bits_are_independent() -> None:
    torch.manual_seed(2)
    dropped = (keep(torch.empty(1_000_000, 4), 0.25) == 0).double()
    correlation = torch.corrcoef(dropped.T) - torch.eye(4)
    assert float(correlation.abs().max()) < 4e-3, "4 standard deviations"
    along = torch.corrcoef(torch.stack([dropped.flatten()[:-4], dropped.flatten()[4:]]))
    assert abs(float(along[0, 1])) < 2e-3


@pytest.mark.parametrize("count", [1, 2, 3, 5, 4096])
def test_any_number_of_values_and_any_layout(count: int) -> None:
    torch.manual_seed(3)
    values = torch.ones(3, count).T
    assert not values.is_contiguous() or count == 1
    result = dropout(values, 0.5)
    assert result.shape == values.shape and set(result.unique().tolist()) <= {0.0, 2.0}
    assert dropout(torch.ones(0, 3), 0.5).shape == (0, 3)


def test_the_generator_of_torch_decides_and_goes_on() -> None:
    values = torch.ones(64, 64)

    def draw() -> list[torch.Tensor]:
        torch.manual_seed(4)
        return [dropout(values, 0.1), torch.rand(3), dropout(values, 0.1)]

    one, other = draw(), draw()
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert not torch.equal(one[0], one[2])


def test_the_gradient_passes_where_the_value_passed() -> None:
    values = torch.randn(32, 32, requires_grad=True)
    result = dropout(values, 0.3)
    result.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad * values.detach(), result.detach())


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_ends_of_the_scale(rate: float) -> None:
    assert torch.equal(dropout(torch.ones(8), rate), torch.full((8,), 1 - rate))


def test_the_module_drops_while_it_trains() -> None:
    module, values = FusedDropout(0.5), torch.ones(64)
    assert module.eval()(values) is values
    assert (module.train()(values) == 0).any()
