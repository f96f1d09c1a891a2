"""What is tried next: a function of the specification and of the events before it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobs.sweeps.record import SweepRecord, TrialRecord
from jobs.sweeps.spec import SweepSpec, parse_sweep
from worker.suggestions import importances, suggest

SPACE: dict[str, Any] = {
    "training.learning_rate": {"range": [1e-5, 1e-1], "log": True},
    "method.type": ["full", "lora"],
    "method.rank": {"int": [4, 64], "step": 4, "when": {"method.type": "lora"}},
    "method.targets": {"choice": [["q"], ["q", "v"]], "when": {"method.type": "lora"}},
    "training.warmup_ratio": {"range": [0.0, 0.2], "step": 0.05},
}


def sweep(sampler: str, space: dict[str, Any] = SPACE, **more: Any) -> SweepSpec:
    # Not parse_sweep: which jobs are valid is another matter here.
    return SweepSpec.model_validate({"job": {}, "space": space, "sampler": sampler, **more})


def cost(trial: TrialRecord) -> float:
    """Best at a learning rate of 1e-3."""
    return abs(math.log10(float(trial.settings.get("training.learning_rate", 1e-3))) + 3)  # type: ignore[arg-type]


def run(spec: SweepSpec, trials: int, record: SweepRecord | None = None) -> SweepRecord:
    """One after the other; every seventh fails, every ninth is cancelled."""
    record = record or SweepRecord("sweep-1")
    while len(record.trials) < trials:
        settings = suggest(spec, record)
        assert settings is not None
        number = len(record.trials)
        trial = TrialRecord(number, settings, (f"job-{number}",), 0.0)
        outcome = "failed" if number % 7 == 6 else "cancelled" if number % 9 == 8 else "succeeded"
        value = cost(trial) if outcome == "succeeded" else None
        record.trials.append(TrialRecord(number, settings, trial.jobs, 0.0, outcome=outcome, value=value))  # type: ignore[arg-type]
    return record


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_after_a_crash_it_is_the_same(sampler: str) -> None:
    spec = sweep(sampler)
    whole = run(spec, 30)
    for kept in (0, 1, 11, 25, 29):
        again = run(spec, 30, SweepRecord("sweep-1", trials=whole.trials[:kept]))
        assert [each.settings for each in again.trials] == [each.settings for each in whole.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_values_are_those_of_the_space(sampler: str) -> None:
    for trial in run(sweep(sampler), 40).trials:
        found = trial.settings
        assert 1e-5 <= float(found["training.learning_rate"]) <= 1e-1  # type: ignore[arg-type]
        assert found["training.warmup_ratio"] in [pytest.approx(0.05 * step) for step in range(5)]
        assert (found["method.type"] == "lora") == ("method.rank" in found) == ("method.targets" in found)
        assert found.get("method.rank", 4) in range(4, 65, 4)
        assert found.get("method.targets", ["q"]) in (["q"], ["q", "v"])


@pytest.mark.parametrize(
    ("low", "high", "step"), [(0.0, 0.5, 0.03125), (0.0, 1.0, 1 / 3), (10000.0, 20000.0, 3.0), (1e-5, 1e-3, 1.5625e-5)]
)
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_step_may_have_many_digits(sampler: str, low: float, high: float, step: float) -> None:
    spec = sweep(sampler, {"training.warmup_ratio": {"range": [low, high], "step": step}})
    values = [float(each.settings["training.warmup_ratio"]) for each in run(spec, 15).trials]  # type: ignore[arg-type]
    assert all(abs((value - low) / step - round((value - low) / step)) < 1e-6 and value <= high for value in values)
    assert importances(spec, run(spec, 15)) is not None


def test_what_an_earlier_version_rounded_is_taken_as_its_step() -> None:
    spec = sweep("tpe", {"training.warmup_ratio": {"range": [0, 0.5], "step": 0.03125}})
    rounded = TrialRecord(0, {"training.warmup_ratio": 0.2812}, ("job-0",), 0.0, outcome="succeeded", value=1.0)
    assert suggest(spec, SweepRecord("sweep-1", trials=[rounded])) is not None


SMALL: list[tuple[dict[str, Any], int]] = [
    ({"training.batch_size": [4, 8], "method.type": ["full", "lora"]}, 4),
    ({"training.batch_size": [4, 8, 16], "training.warmup_ratio": {"range": [0.0, 0.2], "step": 0.1}}, 9),
    ({key: SPACE[key] for key in ("method.type", "method.rank", "method.targets")}, 33),
]


@pytest.mark.parametrize(("space", "combinations"), SMALL)
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_nothing_is_tried_twice_where_it_can_be_counted(sampler: str, space: dict[str, Any], combinations: int) -> None:
    for seed in range(3):
        spec = sweep(sampler, space, seed=seed, max_trials=100)
        assert spec.most_trials == combinations
        whole = run(spec, combinations)
        tried = [each.settings for each in whole.trials]
        assert sorted(map(str, tried)) == sorted(map(str, spec.grid())), "all of them, each once"
        for kept in range(0, combinations, 4):
            again = run(spec, combinations, SweepRecord("sweep-1", trials=whole.trials[:kept]))
            assert [each.settings for each in again.trials] == tried, "after a crash, too"


def test_neighbouring_seeds_have_nothing_in_common() -> None:
    first, second = ({str(each.settings) for each in run(sweep("random", seed=seed), 20).trials} for seed in (0, 1))
    assert not first & second


def test_tpe_stays_away_from_a_corner_that_fails() -> None:
    """The corner would be better the nearer to it: of 480 trials it was tried in 210 while failures were not told."""
    space = {"training.batch_size": [8, 16, 32, 64], "training.learning_rate": SPACE["training.learning_rate"]}
    tried = 0
    for seed in range(5):
        spec, record = sweep("tpe", space, seed=seed), SweepRecord("sweep-1")
        for number in range(24):
            settings = suggest(spec, record)
            assert settings is not None
            size = int(str(settings["training.batch_size"]))
            tried += size == 64
            record.trials.append(
                TrialRecord(number, settings, (f"job-{number}",), 0.0, outcome="failed")
                if size == 64
                else TrialRecord(number, settings, (f"job-{number}",), 0.0, outcome="succeeded", value=1 / size)
            )
    assert tried < 30, "a quarter of 120 by chance"


def test_no_two_are_the_same_and_the_seed_decides() -> None:
    first = [each.settings for each in run(sweep("random"), 20).trials]
    assert len({str(each) for each in first}) == 20
    assert first != [each.settings for each in run(sweep("random", seed=100), 20).trials]


def test_tpe_learns_where_it_is_good() -> None:
    late = run(sweep("tpe"), 60).trials[40:]
    assert sum(map(cost, late)) / len(late) < 0.6, "uniformly it would be 1"


def test_open_and_pruned_trials_are_taken_into_account() -> None:
    spec = sweep("tpe")
    record = run(spec, 15)
    record.trials.append(TrialRecord(15, record.trials[0].settings, ("job-15",), 0.0))
    assert suggest(spec, record) == suggest(spec, record)


def test_a_grid_is_counted_out() -> None:
    spec = sweep("grid", {"training.batch_size": [4, 8], "training.warmup_ratio": {"range": [0, 0.1], "step": 0.1}})
    record = SweepRecord("sweep-1")
    while (settings := suggest(spec, record)) is not None:
        record.trials.append(TrialRecord(len(record.trials), settings, (), 0.0))
    assert [each.settings for each in record.trials] == list(spec.grid())
    assert len(record.trials) == 4


def test_the_parameter_that_decides_is_the_most_important() -> None:
    space = {key: SPACE[key] for key in ("training.warmup_ratio", "training.learning_rate", "method.type")}
    spec = sweep("random", space)
    found = importances(spec, run(spec, 60))
    assert next(iter(found)) == "training.learning_rate"
    assert sum(found.values()) == pytest.approx(1.0)


def test_of_few_trials_nobody_can_tell() -> None:
    spec = sweep("random")
    assert importances(spec, run(spec, 3)) == {}
    same = SweepRecord(
        "sweep-1", trials=[TrialRecord(n, {"method.type": "full"}, (), 0.0, "succeeded", 1.0) for n in range(9)]
    )
    assert importances(spec, same) == {}


def test_an_example_as_the_documentation_has_it() -> None:
    job = {"model": "builtin:roberta-tiny", "data": {"train": "rows.jsonl"}}
    spec = parse_sweep({"job": job, "space": {"training.learning_rate": {"range": [1e-5, 1e-3], "log": True}}})
    assert suggest(spec, SweepRecord("sweep-1")) is not None
