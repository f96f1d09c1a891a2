"""A gradient that is not a number: the step is not taken, it is named, and the last good checkpoint is what remains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.training.attempts import attempt, checkpoints, finished, logged, same_tensors
from tests.training.conftest import MakeRun
from worker.training import loop
from worker.training.__main__ import main
from worker.training.checkpoints.checkpoint import verify

LAST = 20


@pytest.mark.parametrize(("step", "kept"), [(1, []), (6, [5]), (10, [5]), (LAST, [10, 15])])
def test_nan_in_a_gradient_stops_the_run_before_the_update(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, step: int, kept: list[int]
) -> None:
    # Planted: NaN in one element of one gradient, at a step; also at steps after which a save is due, and at the last.
    # Must hold: reason and step are named, what was saved before is whole; once its cause is gone, a further attempt
    # resumes from there and ends like an undisturbed run, bit for bit: nothing of the bad step is in any file.
    monkeypatch.setenv("LONGHAUL_DEVICE", "cpu")
    parts: dict[str, Any] = {
        "training": {"epochs": 4, "batch_size": 8, "learning_rate": 0.01},
        "log": {"every_steps": 1},
    }
    undisturbed, run = make_run("undisturbed", **parts), make_run("planted", **parts)
    assert attempt(undisturbed) == 0
    real, calls = loop.accumulate, 0

    def plant(model: PreTrainedModel, *rest: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = real(model, *rest)
        if calls == step:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient.view(-1)[7] = float("nan")
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", plant)
        assert main(["train", str(run.path), "--attempt", "1"]) == 78
    last = finished(run)
    assert last.reason == "non_finite" and last.error is not None
    assert f"step {step} is NaN or infinite; the weights are those of step {step - 1}" in last.error.message
    assert checkpoints(run) == [f"step-{each:08}" for each in kept]
    assert [verify(run.checkpoints / name).step for name in checkpoints(run)] == kept
    assert [row[0] for row in logged(run)] == list(range(1, step))

    assert attempt(run, 2) == 0
    assert logged(run) == logged(undisturbed)
    assert same_tensors(run.model / "model.safetensors", undisturbed.model / "model.safetensors")
