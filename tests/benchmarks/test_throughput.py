"""How benchmarks.throughput draws rows and compares; `make bench-smoke` runs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import throughput
from benchmarks.throughput import NAMES, Contender, Piece, Race
from benchmarks.versus import compared, rated


def turn(**changes: float) -> dict[str, float]:
    """What a contender says after a round."""
    return {"rows": 10, "tokens": 1000, "flops": 2e9, "seconds": 4.0, "cpu_seconds": 8.0} | changes


def test_rates_count_rows_of_the_mean_flops_of_the_file() -> None:
    rates = rated(turn(), "flops", 1e8)
    assert rates["raw_rows_per_s"] == 2.5
    assert rates["rows_per_s"] == 5.0  # its rows were twice as long as the mean
    assert rates["rows_per_cpu_s"] == 2.5
    assert rates["tokens_per_s"] == 250.0


def test_ratios_are_medians_of_rounds() -> None:
    def rounds(*seconds: float) -> dict[str, Any]:
        return {"rounds": [rated(turn(seconds=one, cpu_seconds=one), "flops", 1e8) for one in seconds]}

    # The machine was ten times slower in the second round, for everybody.
    slow = rounds(2.0, 20.0, 6.0)
    ratios = compared({"ours": rounds(1.0, 10.0, 1.0), "seed": slow, "best": slow, "expert": slow})
    assert ratios["vs_seed"] == ratios["cpu_vs_seed"] == 2.0


def result(**changes: Any) -> dict[str, Any]:
    """Figures within all limits."""
    ran = {"rows_run": 32, "start_loss": 10.0, "end_loss": 9.0}
    good: dict[str, Any] = {"vs_seed": 2.5, "vs_best": 1.3, "vs_expert": 1.0}
    good |= {"rows": 2000, "rounds": 2, "rows_per_round": 16}
    good |= {"contenders": {"ours": ran, "seed": ran}}
    return good | {"same_loss_difference": -0.01, "same_loss_allowed": 0.01} | changes


def test_limits() -> None:
    assert throughput.broken(result()) == []
    assert throughput.broken(result(vs_seed=2.49, vs_expert=0.9)) == ["vs_seed 2.49 < 2.5", "vs_expert 0.90 < 1.0"]
    assert throughput.broken(result(rows=1999)) == ["1999 rows to draw from, fewer than 2000"]


def test_what_has_to_hold_at_any_size() -> None:
    assert throughput.wrong(result()) == []
    assert throughput.wrong(result(rows_per_round=8)) == ["ours has run 32 rows of 16", "seed has run 32 rows of 16"]
    nothing = {"rows_run": 32, "start_loss": 10.0, "end_loss": 10.0}
    assert throughput.wrong(result(contenders={"best": nothing})) == ["best has learned nothing: 10.0000 to 10.0000"]
    assert throughput.wrong(result(same_loss_difference=-0.02)) == ["losses after the same rows differ by -0.0200"]


def test_the_loss_may_differ_as_the_peers_differ_among_themselves() -> None:
    def table(ours: float, *peers: float) -> dict[str, Any]:
        return {name: {"start_loss": 10.0, "same_loss": loss} for name, loss in zip(NAMES, (ours, *peers), strict=True)}

    near = throughput.same_loss(table(9.008, 9.0, 9.0, 9.0))
    assert near["same_loss_difference"] == pytest.approx(0.008) and near["same_loss_allowed"] == pytest.approx(0.01)
    noisy = throughput.same_loss(table(9.0, 8.9, 9.0, 9.1))
    assert noisy["same_loss_allowed"] == pytest.approx(0.3)


class Course(Contender):
    """The part that draws, without processes and models."""

    def __init__(self, race: Race, costs: list[float]) -> None:
        self.race, self.costs = race, costs

    def _padded(self, piece: Piece) -> float:
        return self.costs[piece.inputs]

    def _real(self, pieces: Any) -> float:
        return 0.5 * sum(map(self._padded, pieces))


def test_what_is_run_represents_the_epoch() -> None:
    race = Race(
        model="", prepared="", dtype="fp32", threads=1, batch_size=32, micro_batch=4, rounds=4, steps_per_round=2,
        same_steps=0, held_out=0, learning_rate=0.0, max_grad_norm=1.0, seed=0,
    )  # fmt: skip
    costs = np.random.default_rng(1).lognormal(sigma=1.0, size=1000).tolist()
    course = Course(race, costs)
    drawn = np.array(course.course([[Piece(np.zeros(4, np.int64), unit, 0)] for unit in range(len(costs))]))
    assert drawn.shape == (5 * 2, 8)
    assert int(np.argmax(costs)) in drawn[:2]  # the warm-up has the costliest
    rounds = np.array(costs)[drawn[2:]].reshape(4, 16)
    assert len(np.unique(drawn[2:])) == drawn[2:].size
    # Random draws of 16 have a mean that varies by 30 %.
    assert rounds.mean(1) == pytest.approx(np.mean(costs), rel=0.2)
    assert rounds.mean() == pytest.approx(np.mean(costs), rel=0.05)
