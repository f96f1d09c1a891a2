"""The directory of a sweep: appended to whole or not at all, read to the last whole line, damage is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import Conflict, Damaged, NotFound
from jobs.sweeps.directory import SweepDir, create, find, list_sweeps
from jobs.sweeps.events import SweepCancelRequested, SweepEnded, SweepSubmitted, TrialEnded, TrialStarted
from jobs.sweeps.spec import parse_sweep

SPEC = parse_sweep({"job": {"data": {"train": "rows.jsonl"}}, "space": {"training.batch_size": [4, 8]}})
STARTED = TrialStarted(trial=0, settings={"training.batch_size": 4}, jobs=["job-1"])
ENDED = TrialEnded(trial=0, outcome="succeeded", value=1.5, values=[1.5])


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return create(tmp_path, "sweep-1", SPEC, SweepSubmitted(name="sweep", spec_sha256=SPEC.sha256(), version="1"))


def test_it_is_found_with_what_was_asked_and_what_has_happened(sweep: SweepDir, tmp_path: Path) -> None:
    sweep.append([STARTED, ENDED])
    found = find(tmp_path, "sweep-1")
    record = found.record()
    asked = parse_sweep(
        SPEC.model_dump(by_alias=True) | {"job": {"data": {"train": "rows.jsonl", "validation": "auto"}}}
    )
    assert (found.spec(), [each.id for each in list_sweeps(tmp_path)]) == (asked, ["sweep-1"])
    assert (record.number, record.trials[0].value, record.finished, record.open) == (3, 1.5, [0], [])
    assert record.status == "running" and record.counts == {"succeeded": 1}


def test_the_trials_of_a_sweep_of_an_earlier_version_hold_out_what_they_did(sweep: SweepDir) -> None:
    file = sweep.path / "sweep.json"
    stored = json.loads(file.read_bytes())
    del stored["job"]["data"]["validation"]
    file.write_text(json.dumps(stored))
    assert sweep.spec().trial({"training.batch_size": 4}).data.validation == 0.01
    stored["job"] |= {"kind": "evaluate", "model": "job-1a2b3c"}
    file.write_text(json.dumps(stored))
    assert "validation" not in sweep.spec().job["data"], "an evaluation holds nothing out"


@pytest.mark.parametrize("name", ["sweep-2", "../sweep-1", "sweep-1/..", "job-1", ""])
def test_no_other_name_is_one(sweep: SweepDir, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound):
        find(tmp_path, name)


def test_a_torn_line_is_no_event_and_is_cut_by_the_next(sweep: SweepDir) -> None:
    with open(sweep.events_file, "ab") as file:
        file.write(b'{"number": 2, "sw')
    assert sweep.record().number == 1
    assert sweep.append([STARTED]).number == 2
    assert [event.number for event in sweep.events()] == [1, 2]


def test_a_changed_byte_is_told(sweep: SweepDir) -> None:
    sweep.append([STARTED])
    raw = sweep.events_file.read_bytes()
    sweep.events_file.write_bytes(raw.replace(b'"training.batch_size":4', b'"training.batch_size":8'))
    with pytest.raises(Damaged, match="line 2"):
        sweep.record()
    with pytest.raises(Damaged):
        sweep.append([ENDED])


def test_nothing_follows_the_end(sweep: SweepDir) -> None:
    sweep.append([SweepCancelRequested(), SweepEnded(reason="cancelled")])
    assert sweep.record().status == "cancelled"
    with pytest.raises(Conflict):
        sweep.append([STARTED])


@pytest.mark.parametrize(
    ("reason", "outcome", "status"),
    [
        ("done", "succeeded", "succeeded"), ("done", "failed", "failed"), ("max_hours", "succeeded", "succeeded"),
        ("max_hours", "pruned", "failed"), ("failures", "succeeded", "failed"), ("cancelled", "failed", "cancelled"),
    ],
)  # fmt: skip
def test_a_sweep_of_which_no_trial_has_succeeded_has_failed(
    sweep: SweepDir, reason: Any, outcome: Any, status: str
) -> None:
    best = 0 if outcome == "succeeded" else None
    sweep.append([STARTED, TrialEnded(trial=0, outcome=outcome, value=best), SweepEnded(reason=reason, best=best)])
    assert sweep.record().status == status


def test_a_decision_is_made_on_what_stands_there(sweep: SweepDir) -> None:
    other = SweepDir(sweep.path)
    other.append([STARTED])
    assert sweep.append(lambda record: [ENDED] if record.open else []).finished == [0]
    assert sweep.append(lambda record: [ENDED] if record.open else []).number == 3


def test_a_trial_ends_once(sweep: SweepDir) -> None:
    sweep.append([STARTED, ENDED])
    with pytest.raises(Damaged, match="no open trial 0"):
        sweep.append([ENDED])
    assert sweep.record().number == 3, "nothing of it was written"


def test_a_missing_specification_is_told(sweep: SweepDir) -> None:
    os.remove(sweep.path / "sweep.json")
    with pytest.raises(NotFound):
        sweep.spec()
    (sweep.path / "sweep.json").write_text("{}")
    with pytest.raises(Damaged):
        sweep.spec()
