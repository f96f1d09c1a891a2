"""Wrong job files: every error is named at once, and what the answer suggests makes an accepted job."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from tests.service.running import Service

DATA = {"data": {"train": "rows.jsonl"}}
ROWS = "rows.jsonl"
UNKNOWN = re.compile(r"unknown key; did you mean ([\w.]+)")
WRONG: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"data": {}}, 1),
    ({"dta": {"train": ROWS}}, 1),
    ({"data": {"trian": ROWS}}, 1),
    ({"train": ROWS}, 1),
    ({"training_file": ROWS}, 1),
    ({"data": {"train": "rows.txt"}}, 1),
    ({"data": {"train": "rows.txt"}, "training": {"epochs": 0}}, 2),
    ({"data": {"train": ROWS, "validation": 1.5}}, 1),
    ({"data": {"train": ROWS, "format": "json"}}, 1),
    ({"data": {"train": ROWS, "max_input_tokens": 100_000}}, 1),
    ({"data": {"train": ROWS, "max_target_tokens": 4}}, 1),
    ({"data": {"train": ROWS, "max_source_length": 100}}, 1),
    ({**DATA, "epochs": 3}, 1),
    ({**DATA, "num_train_epochs": 3}, 1),
    ({**DATA, "training": {"epoch": 3}}, 1),
    ({**DATA, "training": {"epochs": "3"}}, 1),
    ({**DATA, "training": {"epochs": 0}}, 1),
    ({**DATA, "training": {"epochs": 2.5}}, 1),
    ({**DATA, "training": {"learning_rate": -1}}, 1),
    ({**DATA, "training": {"learning_rate": "1e-4"}}, 1),
    ({**DATA, "training": {"lr": 1e-4}}, 1),
    ({**DATA, "training": {"lr_scheduler": "cosin"}}, 1),
    ({**DATA, "training": {"warmup_ratio": 1}}, 1),
    ({**DATA, "training": {"batch_size": 0, "seed": -1, "dropout": 2}}, 3),
    ({**DATA, "lr": 1e-4, "seed": 1}, 2),
    ({**DATA, "learning_rate": 1e-4}, 1),
    ({**DATA, "modell": "builtin:t5-tiny"}, 1),
    ({**DATA, "memory": {"optimizer": "adam"}}, 1),
    ({**DATA, "memory": {"optimizer": "adamw8bit"}}, 1),
    ({**DATA, "memory": {"micro_batch": 0}}, 1),
    ({**DATA, "memory": {"micro_batch": "8"}}, 1),
    ({**DATA, "memory": {"microbatch": 8}}, 1),
    ({**DATA, "memory": {"gradient_checkpointing": 1}}, 1),
    ({**DATA, "memory": {"budget": "24"}}, 1),
    ({**DATA, "speed": {"compile": "true"}}, 1),
    ({**DATA, "checkpoint": {"keep": 0}}, 1),
    ({**DATA, "checkpoint": {"best": "lost"}}, 1),
    ({**DATA, "integrations": {"discord": "false"}}, 1),
    ({**DATA, "priority": 1000}, 1),
    ({**DATA, "priority": -1000, "max_restarts": -1}, 2),
    ({**DATA, "resources": {"gpu_memory": 24}}, 1),
    ({"modl": "builtin:t5-tiny", "data": {"trian": ROWS}, "training": {"epoch": 1, "lr_scheduler": "linaer"}}, 4),
]


def follow(job: dict[str, Any], error: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The job as the answer says it should be, and how many errors it names. It reads nothing but the answer."""
    mended = copy.deepcopy(job)
    hint = error.get("hint") or ""
    lines = re.findall(r"^- ([\w.]+): (.*)$", error["message"], re.MULTILINE)
    if not lines:
        key, _, said = error["message"].partition(": ")
        question = re.search(r"did you mean [^?]+\?", hint)
        lines = [(key, f"{said}; {question.group()}" if question else said)]
    for key, said in lines:
        if found := UNKNOWN.search(said):
            put(mended, found[1], take(mended, key))
        else:
            put(mended, key, legal(key, said, hint))
    return mended, len(lines)


def legal(key: str, said: str, hint: str) -> Any:
    """A value that the message names as legal."""
    if "did you mean" in said:
        meant = said.partition("did you mean ")[2].partition(",")[0].rstrip("?")
        return json.loads(meant.replace("'", '"'))
    for words, more in (("greater than or equal to ", 0), ("greater than ", 1), ("less than or equal to ", 0)):
        if bound := re.search(rf"must be {words}(-?[\d.]+)", said):
            return json.loads(bound[1]) + more
    if bound := re.search(r"must be less than ([\d.]+)", said):
        return json.loads(bound[1]) / 2
    if quoted := re.search(r"must be '(\w+)'", said):
        return quoted[1]
    if "an integer" in said:
        return 1
    if "is required" in said:
        assert "longhaul keys" in hint
        return ROWS if key == "data.train" else {"train": ROWS}
    endings = re.search(r"endings known are (\.\w+)", said)
    assert endings, said
    return f"rows{endings[1]}"


def take(job: dict[str, Any], key: str) -> Any:
    """Remove a dotted key; its value."""
    *above, last = key.split(".")
    for name in above:
        job = job[name]
    return job.pop(last)


def put(job: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key."""
    *above, last = key.split(".")
    for name in above:
        job = job.setdefault(name, {})
    if isinstance(value, dict) and isinstance(job.get(last), dict):
        job[last] |= value
    else:
        job[last] = value


@pytest.mark.parametrize(("job", "errors"), WRONG)
def test_every_error_is_named_and_following_the_answer_makes_a_job(
    service: Service, job: dict[str, Any], errors: int
) -> None:
    refused = service.post("/jobs", json=job)
    assert refused.status_code == 422
    mended, named = follow(job, refused.json()["error"])
    assert named == errors, refused.text
    accepted = service.post("/jobs", json=mended)
    assert accepted.status_code == 202, f"{refused.text}\n{mended}\n{accepted.text}"
