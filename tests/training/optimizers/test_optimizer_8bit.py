"""States of one byte: close to full ones, plain tensors in a checkpoint, all compiled before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from jobs.attempt import Heartbeat
from worker.training.journal import Journal
from worker.training.optimizers.adamw import AdamW
from worker.training.optimizers.adamw_8bit import AdamW8bit
from worker.training.steps.randomness import update_seed

LOSS = torch.tensor(1.0)


class Kept(Journal):
    """A journal that remembers its phases."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.phases: list[str] = []

    def _write(self, line: object) -> None:
        if isinstance(line, Heartbeat):
            self.phases.append(line.phase)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Two matrices of one shape that get states of one byte, and a vector that does not."""
    generator = torch.Generator().manual_seed(4)
    shapes = {"first": (64, 128), "second": (64, 128), "norm": (64,)}
    return {
        name: nn.Parameter((0.05 * torch.randn(shape, generator=generator)).to(dtype)) for name, shape in shapes.items()
    }


def draw_gradients(trained: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in trained.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def test_everything_is_compiled_before_the_first_step_and_nothing_is_changed_by_that(tmp_path: Path) -> None:
    trained, journal = parameters(torch.bfloat16), Kept(tmp_path / "journal.jsonl")
    tested = AdamW8bit(trained.items(), weight_decay=0.1, max_grad_norm=1.0, seed=1)
    before = {name: parameter.clone() for name, parameter in trained.items()}
    tested.compile(journal)
    assert journal.phases[0] == "compile"
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained.items())
    assert not any(state.any() for name, state in tested.state_dict().items() if not name.startswith("table"))
    compiled = counters["stats"]["unique_graphs"]
    assert compiled >= 2
    for step in (1, 2):
        draw_gradients(trained, step)
        tested.step(step, 1e-3 / step, LOSS)
    assert counters["stats"]["unique_graphs"] == compiled
    assert all(not torch.equal(parameter, before[name]) for name, parameter in trained.items())


def test_a_checkpoint_holds_plain_tensors_and_the_tables_of_the_codes() -> None:
    tested = AdamW8bit(parameters(torch.bfloat16).items(), weight_decay=0.0, max_grad_norm=1.0, seed=1)
    found = {name: (state.dtype, tuple(state.shape)) for name, state in tested.state_dict().items()}
    byte, full = torch.uint8, torch.float32
    matrices = {
        f"{moment}.{part}.{name}": shape
        for name in ("first", "second")
        for moment in ("exp_avg", "exp_avg_sq")
        for part, shape in (("codes", (byte, (64, 128))), ("scale", (full, (32,))))
    }
    vectors = {f"{moment}.norm": (full, (64,)) for moment in ("exp_avg", "exp_avg_sq")}
    steps = {f"step.{name}": (full, ()) for name in ("first", "second", "norm")}
    assert found == matrices | vectors | steps | {"table.signed": (full, (256,)), "table.unsigned": (full, (256,))}


def test_8_bit_states_move_fp32_weights_as_full_states_do() -> None:
    ours, full = parameters(torch.float32), parameters(torch.float32)
    start = parameters(torch.float32)
    tested = AdamW8bit(ours.items(), weight_decay=0.1, max_grad_norm=1.0, seed=1)
    reference = AdamW(full.items(), weight_decay=0.1, max_grad_norm=1.0, fused=True)
    with torch.compiler.set_stance("force_eager"):
        for step in range(1, 21):
            draw_gradients(ours, step)
            draw_gradients(full, step)
            norms = [tested.step(step, 1e-3, LOSS), reference.step(step, 1e-3, LOSS)]
            assert norms[0].item() == pytest.approx(norms[1].item())
    torch.testing.assert_close(ours["norm"], full["norm"], rtol=1e-4, atol=1e-6)
    for name in ("first", "second"):
        moved, expected = ours[name] - start[name], full[name] - start[name]
        assert ((moved - expected).norm() / expected.norm()).item() < 0.05


def test_weights_and_states_are_those_of_torchaos_optimizer_bit_for_bit() -> None:
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    tested = AdamW8bit(ours.items(), weight_decay=0.1, max_grad_norm=None, seed=1)
    matrices, vector = [theirs["first"], theirs["second"]], theirs["norm"]
    rate = torch.zeros(())
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
    reference = TorchaoAdamW8bit(groups, lr=rate, block_size=256, bf16_stochastic_round=True)
    states = {"step": torch.zeros(()), "exp_avg": torch.zeros(64), "exp_avg_sq": torch.zeros(64)}
    reference.state[vector] = states  # torchao would keep bf16 ones of so small a tensor
    for step in range(1, 6):
        for trained in (ours, theirs):
            draw_gradients(trained, step)
        tested.step(step, 1e-3 / step, LOSS)
        rate.fill_(1e-3 / step)
        torch.manual_seed(update_seed(1, step))
        reference.step()
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())
    saved = tested.state_dict()
    for name in ("first", "second"):
        for moment, state in reference.state[theirs[name]].items():
            if isinstance(state, OptimState8bit):
                assert torch.equal(saved[f"{moment}.codes.{name}"], state.codes)
                assert torch.equal(saved[f"{moment}.scale.{name}"], state.scale)
