"""What a sweep may ask for, what it is told when it asks for something else, and the jobs that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.errors import UserError
from jobs.spec import JobSpec
from jobs.sweeps.space import MOST_TRIALS
from jobs.sweeps.spec import SweepSpec, parse_sweep

JOB = {"model": "builtin:roberta-tiny", "data": {"train": "rows.jsonl"}}
RATE = {"range": [1e-5, 1e-3], "log": True}


def sweep(space: dict[str, Any], **more: Any) -> SweepSpec:
    return parse_sweep({"job": JOB, "space": space, **more})


def test_a_trial_is_the_job_with_its_settings() -> None:
    spec = sweep({"training.learning_rate": RATE}, name="tickets", metric="accuracy")
    made = spec.trial({"training.learning_rate": 3e-4}, 7, seed=2)
    assert (made.name, made.training.learning_rate, made.training.seed) == ("tickets 7 seed 2", 3e-4, 44)
    assert made.checkpoint.best == "accuracy"
    assert made.integrations == spec.trial({}).integrations, (
        "a trial reports as the job says; sinks know that it is one"
    )


def test_the_template_is_not_changed() -> None:
    spec = sweep({"training.batch_size": [8, 16]})
    untouched = spec.trial({}).training.batch_size
    assert spec.trial({"training.batch_size": untouched + 1}).training.batch_size == untouched + 1
    assert spec.trial({}).training.batch_size == untouched


@pytest.mark.parametrize(
    ("space", "more", "says"),
    [
        ({}, {}, "at least 1 item"),
        ({"training.learning_rate": {"range": [1e-3, 1e-5]}}, {}, "first bound must be below"),
        ({"training.learning_rate": {"range": [0, 1], "log": True}}, {}, "above 0"),
        ({"training.learning_rate": {"range": [0.1, 1], "log": True, "step": 0.1}}, {}, "exclude each other"),
        ({"training.learning_rate": {"choice": [1e-3], "range": [1, 2]}}, {}, "got choice and range"),
        ({"training.learning_rate": {"log": True}}, {}, "got none"),
        ({"training.batch_size": {"choice": [8, 8]}}, {}, "twice"),
        ({"training.batch_size": {"choice": [8], "log": True}}, {}, "go with range or int"),
        ({"training.batch_size": {"int": [1, 9], "step": 0.5}}, {}, "step of an integer"),
        ({"training.batch_size": [8]}, {"max_trials": 0}, "max_trials: must be greater than or equal to 1"),
        ({"training.batch_size": [8]}, {"direction": "maximize"}, "direction: of loss a sweep can only minimize"),
        ({"training.learning_rate": {"range": [1e-5, 2.0]}}, {}, "less than or equal to 1"),
        ({"training.epochs": [-1, 2]}, {}, "space.training.epochs: must be greater than"),
        ({"training.batch_sizes": [8]}, {},
         "space.training.batch_sizes: unknown key did you mean space.training.batch_size?"),
        ({"training.seed": [1, 2]}, {"job": {**JOB, "training": {"every_steps": 3}}},
         "did you mean job.log.every_steps or job.checkpoint.every_steps or job.evaluation.every_steps?"),
        ({"training.batch_size": ["many"]}, {}, "space.training.batch_size"),
        ({"model.first": ["many"]}, {}, "no object"),
        ({"name": ["a", "b"]}, {}, "called after the sweep"),
        ({"training.learning_rate": RATE}, {"sampler": "grid"}, "a grid needs"),
        ({"training.learning_rate": {**RATE, "when": {"model": "x"}}}, {}, "must be a parameter before it"),
        ({"training.learning_rate": RATE}, {"metric": "accuracy", "direction": "minimize"}, "can only maximize"),
        ({"training.learning_rate": RATE}, {"metric": "bleu"}, "metric: the task classification has"),
        ({"training.batch_size": 8}, {}, "space.training.batch_size: must be a list of values, or an object with"),
        ({"trainin.batch_size": [8]}, {}, "space.trainin: unknown key did you mean space.training?"),
        ({"job.training.batch_size": [8]}, {}, "space.job: unknown key"),
        ({"training.batch_size": {"int": [8, 16], "step": 20}}, {}, "a step of 20 leads beyond 16"),
        ({"training.seed": [1, 2]}, {"seeds": 2}, "`seeds` above 1"),
        ({"training.learning_rate": RATE}, {"trials": 5}, "unknown key"),
        ({"training.batch_size": {"int": [8, 10**400]}}, {}, "integers are between"),
        ({"training.batch_size": {"int": [8, 10**400]}}, {"sampler": "grid"}, "a grid takes at most 10,000 values"),
        ({"training.warmup_ratio": {"range": [0, 1], "step": 1e-320}}, {}, "more than 1,000,000,000 steps"),
        ({"training.warmup_ratio": {"range": [-1e308, 1e308], "step": 1}}, {}, "more than 1,000,000,000 steps"),
        ({"training.seed": list(range(1000)), "training.batch_size": list(range(1, 1000)), "training.epochs": [1, 2]},
         {}, "at most 2,000"),
        ({"method.type": ["full", "lora"], "method.rank": {"choice": [8, 16], "when": {"method.type": "lorra"}}}, {},
         'space.method.rank.when: method.type is never "lorra"'),
        ({"training.batch_size": [8], "training.epochs": {"choice": [1, 2], "when": {"training.batch_size": []}}}, {},
         "an empty list"),
        ({"training.epochs": [1, 2], "training.batch_size": {"choice": [4, 8], "when": {"training.epochs": 1}},
          "training.seed": {"choice": [1, 2], "when": {"training.epochs": 2, "training.batch_size": 8}}}, {},
         "space.training.seed: no trial has it"),
        ({"training.epochs": [1, 2], "training.batch_size": {"choice": [4, 8], "when": {"training.epochs": [1, 2]}},
          "training.lr_scheduler": {"choice": ["linear", "cosin"],
                                    "when": {"training.epochs": 2, "training.batch_size": 8}}}, {},
         "space.training.lr_scheduler"),
        ({"method.rank": [8, 16], "method": [{"type": "lora"}]}, {}, "put method before method.rank"),
        ({"method.type": ["full", "lora"], "method.rank": [8, 16]}, {}, 'add "when": {"method.type": "lora"}'),
        ({"method.type": ["lora", "full"], "method.rank": [4, 8]}, {}, 'add "when": {"method.type": "lora"}'),
        ({"data.validation": [0.1, 0]}, {}, "space.data.validation: 0 holds no rows out"),
        ({"data.validation": {"range": [0, 0.2]}}, {}, "give a fraction, such as 0.1"),
        ({"training.learning_rate": RATE}, {"job": {**JOB, "data": {"train": "rows.jsonl", "validation": 0}}},
         "job.data.validation: 0 holds no rows out"),
        ({"training.learning_rate": RATE}, {"name": "a\nb"}, "name: "),
        ({"resources.gpus": [1, 2]}, {}, "space.resources.gpus: trials train on one GPU each"),
        ({"resources.engine": ["cluster"]}, {}, "space.resources.engine: trials train on Longhaul's own machines"),
        ({"training.learning_rate": RATE}, {"job": {**JOB, "resources": {"engine": "cluster"}}},
         "job.resources.engine: trials train on Longhaul's own machines"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_key(space: dict[str, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        sweep(space, **more)
    assert says in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("space", "code", "param", "mended"),
    [
        ("training.batch_size", "file_missing", "data.train", False),
        ("model", "file_missing", "data.train.1", False), ("data.target", "no_rows", "data.train", True),
        ("model", "no_rows", "data.train", True), ("training.batch_size", "no_rows", "data.train", False),
        ("model", "no_usable_columns", "data.input", True), ("model", "model_not_found", "model", True),
        ("training.batch_size", "model_not_found", "model", False), ("data.train", "file_missing", "data.train", True),
        ("method.rank", "rank_too_large", "method.rank", True), ("method.rank", "bad_targets", "method", True),
        ("training.batch_size", "does_not_fit", "memory.budget", False),
        ("method.rank", "does_not_fit", "memory.budget", True), ("training.batch_size", "crash", None, False),
    ],
)  # fmt: skip
def test_an_error_of_one_trial_is_told_from_one_of_all(space: str, code: str, param: str | None, mended: bool) -> None:
    made = SweepSpec.model_validate({"job": JOB, "space": {space: [1, 2]}})
    assert made.may_mend(code, param) is mended


def test_an_evaluation_holds_nothing_out() -> None:
    job = {"kind": "evaluate", "model": "builtin:roberta-tiny", "data": {"train": "rows.jsonl"}}
    spec = sweep({"model": ["builtin:roberta-tiny", "builtin:t5-tiny"]}, job=job)
    assert spec.trial({}).data.validation == 0


def test_an_object_is_needed() -> None:
    with pytest.raises(UserError, match="JSON object"):
        parse_sweep([])


CONDITIONAL = {
    "method.type": ["full", "lora"],
    "method.rank": {"choice": [8, 16], "when": {"method.type": "lora"}},
    "training.batch_size": [4, 8],
}


def test_a_grid_has_each_combination_once_and_conditions_hold() -> None:
    spec = sweep(CONDITIONAL, sampler="grid")
    found = list(spec.grid())
    assert spec.most_trials == len(found) == 6
    assert [each for each in found if each["method.type"] == "full"] == [
        {"method.type": "full", "training.batch_size": size} for size in (4, 8)
    ]
    assert len({str(sorted(each.items(), key=str)) for each in found}) == 6


def test_examples_have_every_value_and_are_valid_beside_their_conditions() -> None:
    made: list[JobSpec] = []
    parse_sweep({"job": JOB, "space": CONDITIONAL}, made.append)
    assert {each.training.batch_size for each in made} == {4, 8}
    assert {each.method.rank for each in made if each.method.type == "lora"} == {8, 16}


def test_steps_of_a_range() -> None:
    spec = sweep({"training.warmup_ratio": {"range": [0.0, 0.3], "step": 0.1}}, sampler="grid")
    assert [each["training.warmup_ratio"] for each in spec.grid()] == [0.0, 0.1, 0.2, 0.3]


def test_the_number_of_trials() -> None:
    assert sweep({"training.learning_rate": RATE}).most_trials == 20
    assert sweep({"training.batch_size": [4, 8]}, sampler="grid", max_trials=1).most_trials == 1
    huge = {f"training.{key}": {"int": [1, 1000]} for key in ("batch_size", "max_steps")}
    assert sweep(huge, sampler="grid").most_trials == MOST_TRIALS


def test_no_more_trials_than_combinations() -> None:
    small = {"training.batch_size": [4, 8], "training.epochs": [1, 2, 3]}
    assert sweep(small).most_trials == sweep(small, max_trials=50).most_trials == 6
    assert sweep(small, max_trials=5).most_trials == 5


def test_a_grid_that_is_cut_short_says_what_is_never_tried() -> None:
    space = {"method.type": ["full", "lora"], "training.batch_size": [4, 8], "training.epochs": [1, 2, 3]}
    [warning] = sweep(space, sampler="grid", max_trials=6).warnings
    assert warning.endswith("the first 6 are tried, with one value of method.type")
    assert sweep(space, sampler="grid").warnings == []


def test_conditions_upon_conditions_are_resolved_once() -> None:
    space: dict[str, Any] = {}
    for number in range(16):  # each wants all before it
        space[f"metadata.k{number}"] = {"choice": ["a", "b"], "when": dict.fromkeys(space, "a")}
    made: list[JobSpec] = []
    parse_sweep({"job": JOB, "space": space}, made.append)
    assert len(made) == 33


def test_an_object_is_a_value_that_no_trial_changes() -> None:
    spec = sweep({"training": [{"epochs": 1}, {"epochs": 2}]}, seeds=3)
    for _ in range(2):
        assert [spec.trial({"training": {"epochs": 1}}, seed=seed).training.seed for seed in range(3)] == [42, 43, 44]
    choices = spec.space["training"].choice
    assert choices is not None
    assert [spec.trial({"training": choices[0]}, seed=seed).training.seed for seed in range(3)] == [42, 43, 44]
    assert choices == [{"epochs": 1}, {"epochs": 2}]


def test_asha_with_few_trials_is_warned_about() -> None:
    assert "50" in sweep({"training.learning_rate": RATE}, pruning="asha").warnings[0]
    assert sweep({"training.learning_rate": RATE}, pruning="asha", max_trials=50).warnings == []


def test_what_decides_where_the_sweep_does_not_say() -> None:
    chosen = parse_sweep({"job": {**JOB, "checkpoint": {"best": "macro_f1"}}, "space": {"training.batch_size": [4]}})
    assert (chosen.by, sweep({"training.batch_size": [4]}).by) == ("macro_f1", "loss")


@pytest.mark.parametrize(("metric", "direction"), [("spearman", "maximize"), ("mse", "minimize")])
def test_a_regression_is_swept_by_its_metrics(metric: str, direction: str) -> None:
    asked = {"job": JOB | {"task": "regression"}, "space": {"training.batch_size": [4]}, "metric": metric}
    spec = parse_sweep(asked | {"direction": direction})
    assert (spec.by, spec.trial({}).checkpoint.best) == (metric, metric)
    with pytest.raises(UserError, match=f"of {metric} a sweep can only {direction}"):
        parse_sweep(asked | {"direction": {"maximize": "minimize", "minimize": "maximize"}[direction]})
    with pytest.raises(UserError, match="the task classification has loss, accuracy, macro_f1, and not"):
        parse_sweep(asked | {"job": JOB})


def test_the_specification_is_read_back_as_it_was() -> None:
    spec = sweep(CONDITIONAL, sampler="grid", metric="accuracy")
    again = SweepSpec.model_validate_json(spec.model_dump_json(by_alias=True))
    assert again == spec and again.sha256() == spec.sha256()
