"""benchmarks.throughput with a tiny model: everything is real but the size; which of them is faster is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import throughput
from benchmarks.peers import NAMES, Contender, Piece, Race

ROOT = Path(__file__).parents[2]
WORDS = ["flour", "butter", "egg", "milk", "sugar", "salt", "water", "yeast"]
ROWS = 120


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 1 to 30 words."""
    draw = np.random.default_rng(0)
    text = [
        {name: " ".join(draw.choice(WORDS, draw.integers(1, 31))) for name in ("input", "target")} for _ in range(ROWS)
    ]
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in text))
    return path


def test_all_run_equally_many_rows_and_learn_the_same_from_the_same_ones(file: Path) -> None:
    sizes = ["--rounds", "2", "--rows-per-round", "16", "--batch-size", "8", "--micro-batch", "4", "--held-out", "4"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.throughput",
        "--data",
        str(file),
        "--shape",
        "tiny",
        "--threads",
        "1",
        *sizes,
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    result = json.loads(ran.stdout.splitlines()[-1])
    # So few rows are a limit that is always broken.
    assert ran.returncode == 1 and f"{result['rows']} rows to draw from, fewer than 2000" in result["broken"]
    assert abs(result["same_loss_difference"]) <= result["same_loss_allowed"] < 0.05

    contenders = result["contenders"]
    assert list(contenders) == ["ours", "seed", "best", "expert"]
    for figures in contenders.values():
        assert figures["rows_run"] == result["rounds"] * result["rows_per_round"] == 32
        assert figures["tokens_per_s"] == pytest.approx(figures["raw_rows_per_s"] * figures["tokens_per_row"], rel=0.5)
        assert figures["start_loss"] == pytest.approx(contenders["seed"]["start_loss"], abs=0.01)
        assert figures["end_loss"] < figures["same_loss"] < figures["start_loss"]
        assert figures["waste"] == pytest.approx(figures["epoch_waste"], abs=0.08)
        assert figures["peak_gib"] > 0
    assert contenders["seed"]["epoch_waste"] == max(figures["epoch_waste"] for figures in contenders.values())
    for name in ("seed", "best", "expert"):
        ratios = [
            ours / other
            for ours, other in zip(
                contenders["ours"]["rows_per_s_of_rounds"], contenders[name]["rows_per_s_of_rounds"], strict=True
            )
        ]
        assert result[f"vs_{name}"] == pytest.approx(np.median(ratios), rel=0.01)


def turn(**changes: float) -> dict[str, float]:
    """What a contender says after a round."""
    return {"rows": 10, "tokens": 1000, "flops": 2e9, "seconds": 4.0, "cpu_seconds": 8.0} | changes


def test_rates_count_rows_of_the_mean_flops_of_the_file() -> None:
    rated = throughput.rated(turn(), mean_flops=1e8)
    assert rated["raw_rows_per_s"] == 2.5
    assert rated["rows_per_s"] == 5.0  # its rows were twice as long as the mean
    assert rated["rows_per_cpu_s"] == 2.5
    assert rated["tokens_per_s"] == 250.0


def test_ratios_are_medians_of_rounds() -> None:
    def rounds(*seconds: float) -> dict[str, Any]:
        return {"rounds": [throughput.rated(turn(seconds=one, cpu_seconds=one), mean_flops=1e8) for one in seconds]}

    # The machine was ten times slower in the second round, for everybody.
    slow = rounds(2.0, 20.0, 6.0)
    ratios = throughput.compared({"ours": rounds(1.0, 10.0, 1.0), "seed": slow, "best": slow, "expert": slow})
    assert ratios["vs_seed"] == ratios["cpu_vs_seed"] == 2.0


def result(**changes: Any) -> dict[str, Any]:
    """Figures within all limits."""
    good = {"vs_seed": 2.5, "vs_best": 1.3, "vs_expert": 1.0, "rows": 2000}
    return good | {"same_loss_difference": -0.01, "same_loss_allowed": 0.01} | changes


def test_limits() -> None:
    assert throughput.broken(result()) == []
    assert throughput.broken(result(vs_seed=2.49, vs_expert=0.9)) == ["vs_seed 2.49 < 2.5", "vs_expert 0.90 < 1.0"]
    assert throughput.broken(result(same_loss_difference=-0.02)) == ["losses after the same rows differ by -0.0200"]
    assert throughput.broken(result(rows=1999)) == ["1999 rows to draw from, fewer than 2000"]


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
