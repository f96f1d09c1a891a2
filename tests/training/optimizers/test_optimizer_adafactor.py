"""Adafactor against transformers' own, how little it keeps, and the rounding that it shares with no library."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Reference

from worker.training.optimizers import adafactor
from worker.training.optimizers.adafactor import Adafactor
from worker.training.optimizers.gradients import round_stochastically
from worker.training.planning.tracker import Tracker

LOSS = torch.tensor(1.0)


@pytest.mark.parametrize("piece", [2**24, 7])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_in_fp32_it_is_transformers_adafactor(weight_decay: float, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adafactor, "PIECE", piece)
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (9, 5), "stack": (3, 4, 6), "wide": (2, 40)} | ({} if weight_decay else {"vector": (11,)})
    start = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    ours = {name: nn.Parameter(weight.clone()) for name, weight in start.items()}
    theirs = {name: nn.Parameter(weight.clone()) for name, weight in start.items()}
    tested = Adafactor(ours.items(), weight_decay=weight_decay, max_grad_norm=None, seed=1)
    reference = Reference(
        theirs.values(), lr=1e-2, scale_parameter=False, relative_step=False, weight_decay=weight_decay
    )
    for step in range(1, 8):
        for name, parameter in ours.items():
            parameter.grad = 10 ** (step % 3) * torch.randn(parameter.shape, generator=generator)
            theirs[name].grad = parameter.grad.clone()
        tested.step(step, 1e-2, LOSS)
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


def test_a_matrix_in_pieces_is_updated_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = torch.randn(3, 64, 48, generator=torch.Generator().manual_seed(4)).bfloat16()

    def trained(piece: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        monkeypatch.setattr(adafactor, "PIECE", piece)
        weight = nn.Parameter(torch.linspace(-1, 1, 64 * 48).view(64, 48).bfloat16())
        optimizer = Adafactor([("w", weight)], weight_decay=0.1, max_grad_norm=1.0, seed=1)
        for step, gradient in enumerate(gradients, 1):
            weight.grad = gradient.clone()
            optimizer.step(step, 1e-2, LOSS)
        return weight.detach().float(), optimizer.state_dict()

    (whole, states), (cut, states_cut) = trained(64 * 48), trained(10 * 48)
    for name, state in states.items():
        torch.testing.assert_close(states_cut[name], state, rtol=1e-6, atol=0.0)
    # Rounded by other random numbers: each weight has moved once a step, by a bf16 step more or less.
    assert ((cut - whole).abs() <= 3 * 2.0**-8 * whole.abs().clamp(min=2.0**-8)).all()
    assert (cut - whole).mean().abs() < 1e-4


def test_an_update_takes_no_copy_of_an_embedding() -> None:
    weight = nn.Parameter(torch.zeros(40_000, 1024, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = Adafactor([("w", weight)], weight_decay=0.0, max_grad_norm=1.0, seed=1)
    with Tracker(torch.device("cpu")) as tracker:
        optimizer.step(1, 1e-3, LOSS)
    temporaries = tracker.peak - weight.nbytes - weight.grad.nbytes
    assert 0 < temporaries < 4 * 4 * adafactor.PIECE < 2 * 4 * weight.numel()


def test_adafactor_keeps_a_row_and_a_column_of_a_matrix() -> None:
    weight = nn.Parameter(torch.zeros(512, 256, dtype=torch.bfloat16))
    states = Adafactor([("w", weight)], weight_decay=0.0, max_grad_norm=1.0, seed=1).state_dict()
    assert {name: (state.dtype, tuple(state.shape)) for name, state in states.items()} == {
        "row.w": (torch.float32, (512,)),
        "column.w": (torch.float32, (256,)),
        "steps": (torch.int64, ()),
    }


def test_rounding_takes_one_of_two_neighbours_and_is_right_in_the_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    for value in (1.001, -1.001, 3.14159, -0.05003, 1e-30, 65504.0):
        rounded = round_stochastically(torch.full((100_000,), value), generator)
        assert torch.equal(rounded, rounded.bfloat16().float())
        below, above = sorted(set(rounded.abs().tolist()))[0], sorted(set(rounded.abs().tolist()))[-1]
        assert below <= abs(value) <= above <= below * (1 + 2**-7)
        assert rounded.double().mean().item() == pytest.approx(value, rel=1e-4)


def test_what_bf16_holds_is_left_as_it_is() -> None:
    values = torch.randn(1000).bfloat16().float()
    assert torch.equal(round_stochastically(values.clone(), torch.Generator()), values)
