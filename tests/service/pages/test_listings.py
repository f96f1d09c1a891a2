"""Long lists of a job in parts: files by folder, events by kind."""

from __future__ import annotations

from pathlib import Path

from jobs.events import EVENT_TYPES, Event, JobQueued
from jobs.trainer_facts import CheckpointSaved, DiskLow, Fact
from service.files.confined import files_of
from service.routes.pages import KINDS, folders_of, kind_of, newest_of


def event(number: int, fact: Fact) -> Event:
    return Event.model_validate({"number": number, "job": "job-1", "at": 0.0, "fact": fact})


def test_every_type_of_event_has_a_kind() -> None:
    assert {kind_of(each) for each in EVENT_TYPES} == {*KINDS} - {"", "warnings"}


def test_events_of_a_kind_are_paged_newest_first() -> None:
    saved = CheckpointSaved(step=1, path="checkpoints/step-00000001", bytes=1, seconds=1.0)
    low = DiskLow(step=1, free_bytes=1, needed_bytes=2)
    events = [event(number, [JobQueued(), saved, low][number % 3]) for number in range(1, 13)]
    shown, before = newest_of("checkpoints", events, 3)
    assert ([each.number for each in shown], before) == ([10, 7, 4], 4)
    shown, before = newest_of("checkpoints", events[:3], 3)
    assert ([each.number for each in shown], before) == ([1], None)
    assert [each.number for each in newest_of("warnings", events, 9)[0]] == [11, 8, 5, 2]
    assert [each.number for each in newest_of("", events, 2)[0]] == [12, 11]


def test_files_are_listed_by_folder(tmp_path: Path) -> None:
    for path in ("spec.json", "model/config.json", "checkpoints/step-1/a", "checkpoints/step-1/b"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("four")
    listed = [(each.path, [file.name for file in each.files], each.bytes) for each in folders_of(files_of(tmp_path))]
    assert listed == [("", ["spec.json"], 4), ("checkpoints/step-1", ["a", "b"], 8), ("model", ["config.json"], 4)]
