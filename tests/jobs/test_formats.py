"""Run directories of other versions: older ones are read, newer ones are named and left alone."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest

from jobs.disk.rundir import RunDir, repair
from jobs.errors import Damaged, NewerFormat
from jobs.events import JobSubmitted
from jobs.state import Status
from jobs.version import FORMAT, VERSION

KEPT = sorted((Path(__file__).parents[1] / "formats").glob("*/job-*"))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A copy of the newest one that is kept."""
    return RunDir(shutil.copytree(KEPT[-1], tmp_path / KEPT[-1].name))


def rewrite(run: RunDir, number: int, **fact: object) -> None:
    """Write an event as another version would: with these fields in its fact, and a CRC that fits."""
    lines = run.events_file.read_bytes().splitlines()
    event = json.loads(lines[number - 1])
    del event["crc"]
    event["fact"] |= fact
    body = json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
    lines[number - 1] = body[:-1] + b',"crc":"%08x"}' % zlib.crc32(body)
    run.events_file.write_bytes(b"\n".join(lines) + b"\n")


def test_one_directory_of_every_format_is_kept() -> None:
    assert [int(folder.parent.name) for folder in KEPT] == list(range(1, FORMAT + 1))


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: f"format {folder.parent.name}")
def test_a_directory_of_every_release_is_read(folder: Path) -> None:
    run = RunDir(folder)
    record, submitted = run.verified(), run.events()[0].fact
    assert isinstance(submitted, JobSubmitted) and submitted.format_version == int(folder.parent.name)
    assert (record.status, record.steps, record.attempt) == (Status.SUCCEEDED, 16, 1)
    assert record.result_step is not None and record.result_loss is not None
    assert run.spec().training.epochs == 2 and run.plan().steps == 16
    assert [row.step for row in run.metrics()] == list(range(2, 17, 2))
    assert all(run.attempt_lines(name) for name in ("check", "prepare", 1))


def test_a_newer_directory_is_named_and_left_alone(run: RunDir) -> None:
    rewrite(run, 1, format_version=FORMAT + 1, version="9.1.0")
    before = run.events_file.read_bytes()
    for look in (run.verified, lambda: repair(run)):
        with pytest.raises(NewerFormat, match=f"format {FORMAT + 1}.*this is {VERSION}") as caught:
            look()
        assert caught.value.hint == "run Longhaul 9.1.0: nothing is lost"
    assert run.events_file.read_bytes() == before


@pytest.mark.parametrize("number", [1, 5])
def test_an_event_of_a_newer_version_is_not_cut_off_by_a_repair(run: RunDir, number: int) -> None:
    rewrite(run, number, type="job.teleported", to="mars")
    before = run.events_file.read_bytes()
    for look in (run.verified, lambda: repair(run)):
        with pytest.raises(NewerFormat, match=f"line {number} of events.jsonl .* a newer version of Longhaul wrote it"):
            look()
    assert run.events_file.read_bytes() == before


def test_a_key_of_a_newer_version_names_that_version(run: RunDir) -> None:
    rewrite(run, 1, version="9.1.0")
    spec = json.loads(run.spec_file.read_bytes()) | {"resources": {"boxes": 2}}
    run.spec_file.write_text(json.dumps(spec))
    with pytest.raises(NewerFormat, match=f"Longhaul 9.1.0 made the job, this is {VERSION}") as caught:
        run.spec()
    assert caught.value.hint == "run Longhaul 9.1.0, or put spec.json back from a backup"
    run.spec_file.write_text("{torn")
    with pytest.raises(Damaged) as torn:
        run.spec()
    assert not isinstance(torn.value, NewerFormat)
