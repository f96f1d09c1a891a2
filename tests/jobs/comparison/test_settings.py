"""Which settings of two job files differ: exactly those that were changed."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.comparison.facts import differing_settings, group_of, is_label, settings_of
from jobs.spec import JobSpec, parse_spec
from longhaul.jobfile import apply_changes

FRACTIONS = st.integers(1, 99).map(lambda percent: percent / 100)
TEXTS = st.from_regex(r"[a-z][a-z0-9]{0,7}", fullmatch=True)
SWITCHES = st.booleans()


def auto_or(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just("auto") | numbers


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "name": TEXTS,
    "model": st.sampled_from(["org/one", "org/two@main", "./here", "builtin:t5-tiny"]),
    "task.loss_on": st.sampled_from(["replies", "all"]),
    "method.rank": st.integers(1, 64),
    "method.alpha": st.none() | st.integers(1, 64).map(float),
    "method.dropout": FRACTIONS,
    "method.targets": st.just("all-linear") | st.lists(TEXTS, min_size=1, max_size=3),
    "method.rslora": SWITCHES,
    "method.dora": SWITCHES,
    "method.base_dtype": st.sampled_from(["auto", "bfloat16"]),
    "method.adapter_dtype": st.sampled_from(["auto", "bfloat16", "float32"]),
    "method.merge": SWITCHES,
    "data.train": st.sampled_from(["a.jsonl", "b.csv", "org/rows"])
    | st.just(["a.jsonl", {"source": "b.jsonl", "weight": 2}]),
    "data.validation": FRACTIONS | st.just("held-out.jsonl"),
    "data.max_input_tokens": st.integers(8, 4096),
    "data.max_target_tokens": st.integers(8, 4096),
    "data.max_tokens": st.integers(8, 4096),
    "data.max_invalid_fraction": FRACTIONS,
    "data.csv_lists": SWITCHES,
    "data.normalize": SWITCHES,
    "training.epochs": st.integers(1, 20),
    "training.max_steps": st.none() | st.integers(1, 1000),
    "training.max_hours": st.none() | st.integers(1, 100).map(float),
    "training.batch_size": st.integers(1, 512),
    "training.learning_rate": FRACTIONS,
    "training.warmup_ratio": FRACTIONS,
    "training.lr_scheduler": st.sampled_from(["linear", "cosine", "constant"]),
    "training.weight_decay": FRACTIONS,
    "training.max_grad_norm": st.none() | FRACTIONS,
    "training.dropout": st.none() | FRACTIONS,
    "training.seed": st.integers(0, 1000),
    "memory.budget": auto_or(st.integers(1, 80)),
    "memory.micro_batch": auto_or(st.integers(1, 64)),
    "memory.activation_checkpointing": auto_or(st.integers(0, 4)),
    "memory.optimizer": st.sampled_from(["auto", "adamw", "adamw_offload", "adamw_8bit", "adafactor"]),
    "memory.empty_cache_steps": st.integers(0, 100),
    "memory.on_oom": st.sampled_from(["recover", "fail"]),
    "resources.gpu_memory_gib": st.none() | st.integers(1, 80),
    "resources.gpu_name": st.none() | TEXTS,
    "resources.engine": st.none() | st.sampled_from(["cluster", "cloud-2"]),
    "log.every_steps": st.integers(1, 100),
    "checkpoint.every_minutes": st.none() | st.integers(1, 100),
    "checkpoint.keep": st.integers(1, 10),
    "evaluation.every_steps": st.integers(1, 1000),
    "evaluation.sample_tokens": auto_or(st.integers(1, 100)),
    "integrations.discord": SWITCHES,
    "priority": st.integers(-100, 100),
    "max_restarts": st.integers(0, 100),
    "metadata.team": TEXTS,
}
JOBS = st.fixed_dictionaries({}, optional=VALUES)
LORA = {"data": {"train": "rows.jsonl"}, "method": {"type": "lora"}}


def changed(job: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The job file after `--set` of each."""
    return apply_changes(copy.deepcopy(job), [f"{key}={json.dumps(value)}" for key, value in changes.items()])


def value_of(spec: JobSpec, key: str) -> object:
    found = settings_of(spec).get(key)
    return found and found.value


@settings(deadline=None)
@given(JOBS, JOBS)
def test_the_difference_to_a_clone_is_exactly_what_was_set(
    given_first: dict[str, Any], changes: dict[str, Any]
) -> None:
    job = changed(LORA, given_first)
    original, clone = parse_spec(job), parse_spec(changed(job, changes))
    found, equal = differing_settings([original, clone])
    assert found.keys() == {key for key in changes if value_of(original, key) != value_of(clone, key)}
    assert all(found[key] == [value_of(original, key), value_of(clone, key)] for key in found)
    every = settings_of(original).keys() | settings_of(clone).keys()
    assert equal == sum(not is_label(key) and key not in found for key in every)


def test_every_key_of_a_job_is_drawn_but_those_that_a_clone_cannot_set_alone() -> None:
    spec = parse_spec(changed(LORA, {"metadata.team": "kitchen"}))
    assert settings_of(spec).keys() - VALUES.keys() == {
        "method.type", "task.type", "task.multi_label", "task.class_weights", "task.labels", "data.format",
        "data.input", "data.target", "data.csv_quoting", "memory.other_processes", "speed.compile", "speed.fused",
        "checkpoint.every_steps", "checkpoint.best", "training.early_stopping",
        "evaluation.max_rows", "evaluation.samples", "integrations.wandb",
        "integrations.wandb.project", "integrations.wandb.entity", "integrations.wandb.artifacts", "resume_from",
        "kind", "data.keep_line_breaks", "data.learn", "data.chat_template", "evaluation.generate_rows",
        "evaluation.metrics", "resources.gpus",
    }  # fmt: skip


def test_another_method_is_one_difference_and_what_is_set_of_it() -> None:
    full = parse_spec({"data": {"train": "rows.jsonl"}})
    assert differing_settings([full, parse_spec(LORA)])[0] == {"method.type": ["full", "lora"]}
    of_rank_4 = parse_spec(changed(LORA, {"method.rank": 4}))
    assert differing_settings([full, of_rank_4])[0] == {"method.type": ["full", "lora"], "method.rank": [None, 4]}
    assert differing_settings([of_rank_4, full, parse_spec(LORA)])[0]["method.rank"] == [4, None, 16]


def test_a_part_that_is_switched_off_is_one_difference() -> None:
    on, off = ({"data": {"train": "rows.jsonl"}, "integrations": {"wandb": each}} for each in (True, False))
    assert differing_settings([parse_spec(on), parse_spec(off)])[0] == {"integrations.wandb": [True, None]}


def test_where_a_setting_belongs() -> None:
    groups = {
        key: group_of(key)
        for key in ("data.train", "method.adapter_dtype", "method.rank", "task.type", "memory.budget")
    }
    assert list(groups.values()) == ["data", "model", "training", "training", "memory"]
    assert [is_label(key) for key in ("name", "metadata.team", "model")] == [True, True, False]
