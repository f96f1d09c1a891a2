"""The form of a job is what the specification says, and nothing else."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from jobs.spec import JobSpec
from jobs.text.schemas import keys
from service.pages.job_form import Field, Switch, changes, fields, filled_in, in_fields

SWITCHED = {"integrations.wandb": "true", "training.early_stopping": "false"}
"""Parts that can be switched off, and whether they are on by default."""


def spec(**more: Any) -> JobSpec:
    """The smallest, with changes."""
    return JobSpec.model_validate({"data": {"train": "rows.jsonl"}} | more)


def test_every_key_of_a_job_has_a_field_with_its_default_and_meaning() -> None:
    schema = JobSpec.model_json_schema()
    told = {key.name: key for key in keys(schema["properties"], schema["$defs"]) if "[]" not in key.name}
    parts = {name for name, key in told.items() if key.holds_keys} - {*SWITCHED}
    assert len(parts) > 10 and fields().keys() == told.keys() - parts
    for name, field in fields().items():
        assert field.meaning and field.values, name
        assert field.default == SWITCHED.get(name, told[name].default), name


def test_fields_are_chosen_from_or_typed_as_their_types_say() -> None:
    def of(key: str) -> Field:
        return fields()[key]

    assert of("training.lr_scheduler").choices == ('"linear"', '"cosine"', '"constant"')
    assert of("speed.compile").choices == ('"auto"', "true", "false")
    assert {'"loss"', '"macro_f1"', "null"} <= {*of("checkpoint.best").choices}
    assert of("training.early_stopping.patience").switch == Switch("training.early_stopping", "true")
    assert of("training.epochs").keyboard == "numeric" and of("training.learning_rate").keyboard == "decimal"
    assert of("priority").keyboard == "text", "a phone's keyboard for numbers has no minus"
    assert of("memory.micro_batch").types == ("string", "integer")
    assert of("method.rank").switch == Switch("method.type", '"lora"') and of("method.type").switch is None
    assert of("integrations.wandb.project").switch == Switch("integrations.wandb", "true")
    assert of("data.input").long and not of("name").long


def test_only_what_differs_from_the_defaults_is_filled_in() -> None:
    job = spec(
        method="lora", checkpoint={"every_minutes": None}, integrations={"wandb": False}, metadata={"team": "kitchen"},
        training={"learning_rate": 1e-3, "early_stopping": {"patience": 5}},
    )  # fmt: skip
    assert filled_in(job) == {
        "data.train": "rows.jsonl", "method.type": '"lora"', "checkpoint.every_minutes": "null",
        "integrations.wandb": "false", "metadata": '{"team": "kitchen"}', "training.learning_rate": "0.001",
        "training.early_stopping": "true", "training.early_stopping.patience": "5",
    }  # fmt: skip
    assert changes(spec(), job)[0] == ("metadata", "{}", '{"team": "kitchen"}')
    assert changes(job, job) == []


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        ("Add --set 'data.input={body}' --set data.target=queue --set task.multi_label=true",
         "Set data.input = {body}, data.target = queue and task.multi_label = true"),
        ("to learn it: --set " + shlex.quote("data.target={it's}"), "to learn it: data.target = {it's}"),
        ("to learn each, add --set task.multi_label=true", "to learn each, set task.multi_label = true"),
        ("say which: --set 'task.labels=[-1,0,1]' learns three", "say which: task.labels = [-1,0,1] learns three"),
        ("take a model for it; add names", "take a model for it; add names"),
    ],
)  # fmt: skip
def test_a_hint_for_the_command_line_names_fields_on_the_page(hint: str, said: str) -> None:
    assert in_fields(hint) == said
