"""events.jsonl: numbered without gap, torn lines cut, superseded attempts refused, decided under the lock."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from jobs.disk import event_log, files
from jobs.disk.event_log import EventLog, read_event
from jobs.disk.files import LineWriter, append_line
from jobs.disk.rundir import RunDir, create, last_metrics, list_runs, truncate_metrics
from jobs.errors import Conflict, Damaged, InvalidTransition, Superseded
from jobs.events import (
    EVENT_TYPES,
    AnyFact,
    AttemptEnded,
    Event,
    JobCancelled,
    JobCancelRequested,
    JobPaused,
    JobPauseRequested,
    JobPauseWithdrawn,
    JobQueued,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    JobUnprepared,
    JobValidated,
    any_fact,
)
from jobs.metrics import MetricRow
from jobs.record import JobRecord, fold
from jobs.spec import parse_spec
from jobs.state import Requested, Stage, Status
from jobs.trainer_facts import CheckpointSaved, EvaluationFinished, Sample
from tests.support.machine import longest_file
from tests.support.samples import QUEUED, STARTED, checked, prepared, read_lines

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})


def submitted(**more: object) -> JobSubmitted:
    return JobSubmitted.model_validate({"name": "n", "model": "m", "spec_sha256": SPEC.sha256(), **more})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return create(tmp_path, "job-1", SPEC, submitted())[0]


def saved(step: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, path=f"checkpoints/step-{step:08d}", bytes=1, seconds=0.1)


def test_the_set_of_events_is_the_design() -> None:
    schema = any_fact.json_schema()
    assert tuple(sorted(schema["discriminator"]["mapping"])) == tuple(sorted(EVENT_TYPES))
    assert len(EVENT_TYPES) == 33


def test_creating_twice_makes_one(tmp_path: Path) -> None:
    first, made = create(tmp_path, "job-1", SPEC, submitted())
    again, made_again = create(tmp_path, "job-1", SPEC, submitted(name="other"))
    assert (made, made_again) == (True, False)
    assert again.record().name == first.record().name == "n"
    assert [run.id for run in list_runs(tmp_path)] == ["job-1"]
    assert not list(tmp_path.glob("tmp-*"))


def test_a_life_adds_up(run: RunDir) -> None:
    run.append(QUEUED)
    run.append([STARTED])
    run.append([saved(5)], attempt=1)
    run.append([AttemptEnded(reason="interrupted", step=5), JobQueued()])
    record, _ = run.append([STARTED])
    assert (record.status, record.attempt, record.noted, record.restarts) == (Status.RUNNING, 2, 0, 0)
    record, _ = run.append([AttemptEnded(reason="done", step=10), JobSucceeded(model="model", step=10, loss=1.0)])
    assert record.status is Status.SUCCEEDED
    assert record == run.record()
    assert [event.number for event in run.events()] == list(range(1, record.number + 1))
    assert [event.attempt for event in run.events()] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


LIVES: dict[str, list[AnyFact]] = {
    "trained": [*QUEUED, STARTED, AttemptEnded(reason="done", step=10), JobSucceeded(model="m", step=10, loss=1.0)],
    "prepared again": [
        *QUEUED, STARTED, AttemptEnded(reason="not_prepared"), JobUnprepared(message="gone"),
        prepared(10), JobQueued(), STARTED,
    ],
    "paused": [*QUEUED, STARTED, AttemptEnded(reason="interrupted"), JobPaused(), JobResumed(), STARTED],
    "crashed": [*QUEUED, STARTED, AttemptEnded(reason="crash"), JobQueued(), STARTED],
}  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
def test_a_stage_whose_last_event_is_lost_is_done_again(run: RunDir, life: str) -> None:
    """A cut is possible between any two events: somebody can resume from each."""
    for fact in LIVES[life]:
        record, _ = run.append([fact])
        if record.status is Status.VALIDATING:
            assert record.stage in (Stage.CHECK, Stage.PREPARE), fact.type
            verdict = QUEUED if record.stage is Stage.CHECK else QUEUED[1:]
            after = fold(run.id, [*run.events(), *numbered(run.id, record, verdict)])
            assert (after.status, after.stage) == (Status.QUEUED, Stage.TRAIN)
        elif not record.status.terminal:
            assert record.stage is Stage.TRAIN, fact.type


def test_a_dry_run_whose_last_event_is_lost_is_checked_again(tmp_path: Path) -> None:
    run, _ = create(tmp_path, "job-1", SPEC, submitted(dry_run=True))
    for _ in range(2):
        record, _ = run.append([checked()])
        assert (record.status, record.stage) == (Status.VALIDATING, Stage.CHECK)
    assert run.append([JobValidated()])[0].status is Status.VALIDATED


def numbered(job: str, record: JobRecord, facts: list[AnyFact]) -> list[Event]:
    return [
        Event(number=number, job=job, at=1.0, attempt=record.attempt, fact=fact)
        for number, fact in enumerate(facts, record.number + 1)
    ]


def test_nothing_is_written_when_one_of_several_facts_may_not_follow(run: RunDir) -> None:
    before = run.events_file.read_bytes()
    with pytest.raises(InvalidTransition):
        run.append([checked(), JobPaused()])
    assert run.events_file.read_bytes() == before


def test_terminal_states_never_change(run: RunDir) -> None:
    run.append([JobCancelled()])
    for fact in (*QUEUED, STARTED, JobResumed(), JobCancelled(), JobCancelRequested()):
        with pytest.raises(Conflict):
            run.append([fact])


def test_an_append_that_the_disk_does_not_take_has_changed_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.events_file.read_bytes()
    with longest_file(len(before) + 20), pytest.raises(OSError, match="No space left"):
        run.append([JobCancelled()])
    assert run.events_file.read_bytes() == before
    calls: list[int] = []

    def fail_once(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_once)
        with pytest.raises(OSError, match="No space left"):
            run.append([JobCancelled()])
    assert run.events_file.read_bytes() == before and len(calls) == 2, "the cut is on disk, too"
    assert run.append([JobCancelled()])[0].status is Status.CANCELLED


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EPERM, Damaged), (errno.EIO, Damaged), (errno.EMFILE, OSError), (errno.EROFS, OSError)]
)
def test_events_that_cannot_be_opened_are_damage_unless_no_file_can_be(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refused(*arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(event_log, "FileIO", refused)
    for read in (run.record, run.events, lambda: run.append([STARTED])):
        with pytest.raises(kind, match=os.strerror(number)):
            read()


def test_an_append_that_cannot_be_projected_is_an_append(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    def fail(record: JobRecord, new: list[Event]) -> None:
        raise ValueError("Redis is mad")

    record, _ = run.append([JobCancelled()], project=fail)
    assert record == run.record() and record.status is Status.CANCELLED
    assert "events up to 2 wait for reconcile" in caplog.text


def test_a_torn_last_line_is_cut_at_every_length(run: RunDir) -> None:
    whole = run.events_file.read_bytes()
    run.append([checked()])
    line = run.events_file.read_bytes()[len(whole) :]
    for length in (1, len(line) // 2, len(line) - 1):
        run.events_file.write_bytes(whole + line[:length])
        assert run.record().number == 1
        record, new = run.append([checked()])
        assert (record.number, new[0].number) == (2, 2)
        assert [event.number for event in run.events()] == [1, 2]


def test_an_append_by_a_superseded_attempt_is_refused(run: RunDir) -> None:
    run.append([*QUEUED, STARTED])
    run.append([AttemptEnded(reason="worker_lost"), JobQueued()])
    run.append([STARTED])
    for late in (saved(5), AttemptEnded(reason="crash")):
        with pytest.raises(Superseded, match="attempt 1 is over: attempt 2 has started"):
            run.append([late], attempt=1)
    assert run.record().attempt == 2


def test_an_append_whose_lock_was_lost_meanwhile_overwrites_nothing(run: RunDir) -> None:
    # Between reading and writing this box stood still; over NFS it then holds no lock, and another one has written.
    run.append([*QUEUED, STARTED])
    theirs = Event(number=6, job=run.id, at=1.0, attempt=1, fact=AttemptEnded(reason="worker_lost"))

    def stand_still(record: JobRecord) -> list[AnyFact]:
        with open(run.events_file, "ab") as file:
            file.write(event_log.event_line(theirs))
        return [saved(5)]

    with pytest.raises(Conflict, match="this box was cut off"):
        run.append(stand_still, attempt=1)
    assert run.events()[-1] == theirs and run.record().attempt_open is False


def test_a_trainer_has_no_word_after_its_attempt_ended(run: RunDir) -> None:
    run.append([*QUEUED, STARTED])
    run.append([AttemptEnded(reason="worker_lost"), JobQueued()])
    with pytest.raises(Conflict, match=r"checkpoint\.saved cannot follow"):
        run.append([saved(5)], attempt=1)


def test_appends_from_many_threads_leave_no_gap(run: RunDir) -> None:
    run.append([*QUEUED, STARTED])
    evaluation = EvaluationFinished(step=1, loss=1.0, rows=1, seconds=0.1, best=False)

    def append_some() -> None:
        for _ in range(20):
            run.append([evaluation], attempt=1)

    threads = [threading.Thread(target=append_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.number for event in run.events()] == list(range(1, 6 + 160))


def test_an_append_reads_what_others_have_appended_and_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = Sample(input="words " * 200, target="words " * 200, generated="words " * 200)
    evaluation = EvaluationFinished(step=1, loss=1.0, rows=1, seconds=0.1, best=False, samples=[sample] * 3)
    run.append([*QUEUED, STARTED])
    run.append([evaluation] * 2000, attempt=1)
    other = EventLog(run.events_file)  # as another process has it
    other.append([evaluation], 1, None)
    parsed: list[bytes] = []

    def counted(line: bytes) -> Event:
        parsed.append(line)
        return read_event(line)

    monkeypatch.setattr(event_log, "read_event", counted)
    run.append([evaluation], attempt=1)
    assert len(parsed) == 1, "that of the other one"
    RunDir(run.path).append([evaluation], attempt=1)
    assert len(parsed) == 1
    assert other.record().number == run.record().number == 2008 and len(parsed) == 3
    assert run.record() == fold(run.id, run.events())


@pytest.mark.parametrize("replaced", [True, False])
def test_a_file_that_was_edited_is_read_anew(run: RunDir, replaced: bool) -> None:
    run.append([*QUEUED, STARTED])
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    if replaced:
        run.events_file.unlink()
    run.events_file.write_bytes(b"".join(lines[:2]))
    assert run.record().number == 2
    run.append([prepared(10), JobQueued()])
    assert [event.type for event in run.events()][2:] == ["job.prepared", "job.queued"]
    edited = run.events_file.read_bytes().replace(b'"steps":10', b'"steps":99')
    run.events_file.write_bytes(edited)
    os.utime(run.events_file, ns=(0, 0))  # the clock of a file system may be too coarse to tell
    for read in (run.record, run.events, lambda: run.append([STARTED])):
        with pytest.raises(Damaged, match=r"line 3 of .*events\.jsonl is not an event: its CRC does not match"):
            read()


def test_lines_without_a_crc_are_those_of_an_earlier_version(run: RunDir) -> None:
    run.append(QUEUED)
    lines = [event.model_dump_json() for event in run.events()]
    run.events_file.write_text("".join(f"{line}\n" for line in lines))
    record, new = run.append([STARTED])
    assert (record.status, record.number) == (Status.RUNNING, 5)
    raw = run.events_file.read_bytes().splitlines()
    assert [read_event(line) for line in raw] == run.events() == [*run.events()[:4], *new]
    assert b'"crc"' in raw[4] and json.loads(raw[4])["number"] == 5


def test_a_request_lives_as_long_as_the_attempt(run: RunDir) -> None:
    run.append([*QUEUED, STARTED])
    record, _ = run.append([JobPauseRequested()])
    assert record.requested is Requested.PAUSE
    record, _ = run.append([JobPauseWithdrawn()])
    assert record.requested is Requested.NONE
    run.append([JobCancelRequested()])
    record, _ = run.append([saved(3)], attempt=1)
    assert record.requested is Requested.CANCEL
    record, _ = run.append([AttemptEnded(reason="interrupted"), JobCancelled(checkpoint=record.checkpoint)])
    assert record.requested is Requested.NONE


def test_counted_restarts_start_again_after_progress(run: RunDir) -> None:
    run.append(QUEUED)
    counts = []
    for attempt in range(1, 5):
        run.append([STARTED])
        if attempt == 3:
            run.append([saved(7)], attempt=attempt)
        record, _ = run.append([AttemptEnded(reason="crash"), JobQueued(not_before_s=10)])
        counts.append(record.restarts)
        assert record.not_before > record.submitted_at + 9
    assert counts == [1, 2, 1, 2]


def test_decisions_are_made_on_the_newest_record(run: RunDir) -> None:
    run.append([checked()])
    seen: list[JobRecord] = []

    def decide(record: JobRecord) -> list[AnyFact]:
        seen.append(record)
        return []

    record, new = run.append(decide)
    assert (seen[0].number, record.number, new) == (2, 2, [])


def test_projection_is_called_under_the_lock_with_what_was_written(run: RunDir) -> None:
    calls: list[tuple[int, list[Event]]] = []
    run.append([checked()], project=lambda record, new: calls.append((record.number, new)))
    assert calls[0][0] == 2 and calls[0][1] == run.events(after=1)


def row(step: int, loss: float, attempt: int = 1) -> MetricRow:
    zero = dict.fromkeys(MetricRow.model_fields, 0)
    return MetricRow.model_validate(zero | {"step": step, "loss": loss, "attempt": attempt})


def test_a_later_attempt_replaces_metrics_of_the_same_step(run: RunDir) -> None:
    for each in (row(10, 3.0), row(20, 2.0), row(20, 1.9, attempt=2), row(30, 1.0, attempt=2)):
        append_line(run.metrics_file, each)
    assert [(each.step, each.loss) for each in run.metrics()] == [(10, 3.0), (20, 1.9), (30, 1.0)]
    newest = last_metrics(run.metrics_file)
    assert newest is not None and newest.step == 30


def test_a_torn_metrics_line_is_cut_before_the_next(run: RunDir) -> None:
    append_line(run.metrics_file, row(10, 3.0))
    with open(run.metrics_file, "ab") as file:
        file.write(b'{"step": 20, "lo')
    append_line(run.metrics_file, row(30, 1.0))
    assert [each.step for each in run.metrics()] == [10, 30]


def test_what_a_full_disk_does_not_take_is_written_later_in_order(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    full = True
    real = files.append_line

    def append(file: Path, line: MetricRow) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, line)

    monkeypatch.setattr(files, "append_line", append)
    lines = LineWriter(run.metrics_file)
    lines.write(row(10, 3.0))
    lines.write(row(15, 2.5), keep=False)
    lines.write(row(20, 2.0))
    with pytest.raises(OSError, match="No space left"):
        lines.close()
    full = False
    lines.write(row(30, 1.0))
    lines.close()
    assert [each.step for each in run.metrics()] == [10, 20, 30]


def test_rows_beyond_the_step_where_an_attempt_begins_are_removed(
    run: RunDir, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate_metrics(run.metrics_file, 10)
    assert not run.metrics_file.exists()
    # As earlier versions left it: step 20 twice. The last line is torn.
    rows = [row(10, 3.0), row(20, 2.0), row(30, 1.5), row(20, 1.9, attempt=2)]
    run.metrics_file.write_text("".join(f"{each.model_dump_json()}\n" for each in rows) + 'no row\n{"step": 40, "lo')
    truncate_metrics(run.metrics_file, 20)
    assert read_lines(run.metrics_file, MetricRow) == [rows[0], rows[3]] and "no row of metrics" in caplog.text
    content = run.metrics_file.read_bytes()
    with open(run.metrics_file, "ab") as of_an_attempt_that_is_over:
        truncate_metrics(run.metrics_file, 20)
        of_an_attempt_that_is_over.write(b"late")
    assert run.metrics_file.read_bytes() == content

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        truncate_metrics(run.metrics_file, 0)
    assert read_lines(run.metrics_file, MetricRow) == [rows[0], rows[3]] and "no room on the disk" in caplog.text
    assert not list(run.path.glob(".metrics*"))
    truncate_metrics(run.metrics_file, 0)
    assert run.metrics_file.read_bytes() == b""
