"""events.jsonl: numbered without gap, torn lines cut, superseded attempts refused, decided under the lock."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from jobs import files
from jobs.errors import Conflict, IllegalMove, Superseded
from jobs.events import (
    EVENT_TYPES,
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    EvaluationFinished,
    Event,
    JobCancelled,
    JobChecked,
    JobPaused,
    JobPrepared,
    JobQueued,
    JobRequested,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    any_fact,
)
from jobs.files import LineWriter, append_line, last_row
from jobs.metrics import MetricRow
from jobs.record import JobRecord
from jobs.rundir import RunDir, create, list_runs
from jobs.spec import parse_spec
from jobs.state import Request, Status

SPEC = parse_spec({"data": {"train": "rows.jsonl"}})
TO_QUEUE: list[AnyFact] = [JobChecked(plan={}), JobPrepared(data={}, steps=10), JobQueued()]
STARTED = AttemptStarted(worker="w", device="cpu")


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
    assert len(EVENT_TYPES) == 23


def test_creating_twice_makes_one(tmp_path: Path) -> None:
    first, made = create(tmp_path, "job-1", SPEC, submitted())
    again, made_again = create(tmp_path, "job-1", SPEC, submitted(name="other"))
    assert (made, made_again) == (True, False)
    assert again.record().name == first.record().name == "n"
    assert [run.id for run in list_runs(tmp_path)] == ["job-1"]
    assert not list(tmp_path.glob("tmp-*"))


def test_a_life_adds_up(run: RunDir) -> None:
    run.append(TO_QUEUE)
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


def test_nothing_is_written_when_one_of_several_facts_may_not_follow(run: RunDir) -> None:
    before = run.events_file.read_bytes()
    with pytest.raises(IllegalMove):
        run.append([JobChecked(plan={}), JobPaused()])
    assert run.events_file.read_bytes() == before


def test_terminal_states_never_change(run: RunDir) -> None:
    run.append([JobCancelled()])
    for fact in (*TO_QUEUE, STARTED, JobResumed(), JobCancelled(), JobRequested(request="cancel")):
        with pytest.raises(Conflict):
            run.append([fact])


def test_a_torn_last_line_is_cut_at_every_length(run: RunDir) -> None:
    whole = run.events_file.read_bytes()
    run.append([JobChecked(plan={})])
    line = run.events_file.read_bytes()[len(whole) :]
    for length in (1, len(line) // 2, len(line) - 1):
        run.events_file.write_bytes(whole + line[:length])
        assert run.record().number == 1
        record, new = run.append([JobChecked(plan={})])
        assert (record.number, new[0].number) == (2, 2)
        assert [event.number for event in run.events()] == [1, 2]


def test_an_append_by_a_superseded_attempt_is_refused(run: RunDir) -> None:
    run.append([*TO_QUEUE, STARTED])
    run.append([AttemptEnded(reason="lost"), JobQueued()])
    run.append([STARTED])
    for late in (saved(5), AttemptEnded(reason="crash")):
        with pytest.raises(Superseded, match="attempt 1 is over: attempt 2 has started"):
            run.append([late], attempt=1)
    assert run.record().attempt == 2


def test_a_trainer_has_no_word_after_its_attempt_ended(run: RunDir) -> None:
    run.append([*TO_QUEUE, STARTED])
    run.append([AttemptEnded(reason="lost"), JobQueued()])
    with pytest.raises(Conflict, match=r"checkpoint\.saved cannot follow"):
        run.append([saved(5)], attempt=1)


def test_appends_from_many_threads_leave_no_gap(run: RunDir) -> None:
    run.append([*TO_QUEUE, STARTED])
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


def test_a_request_lives_as_long_as_the_attempt(run: RunDir) -> None:
    run.append([*TO_QUEUE, STARTED])
    record, _ = run.append([JobRequested(request="pause")])
    assert record.request is Request.PAUSE and run.request_file.read_text().strip() == "pause"
    record, _ = run.append([JobRequested(request="none")])
    assert record.request is Request.NONE and not run.request_file.exists()
    run.append([JobRequested(request="cancel")])
    run.append([saved(3)], attempt=1)
    assert run.request_file.read_text().strip() == "cancel"
    record, _ = run.append([AttemptEnded(reason="interrupted"), JobCancelled(checkpoint=record.checkpoint)])
    assert record.request is Request.NONE and not run.request_file.exists()


def test_counted_restarts_start_again_after_progress(run: RunDir) -> None:
    run.append(TO_QUEUE)
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
    run.append([JobChecked(plan={})])
    seen: list[JobRecord] = []

    def decide(record: JobRecord) -> list[AnyFact]:
        seen.append(record)
        return []

    record, new = run.append(decide)
    assert (seen[0].number, record.number, new) == (2, 2, [])


def test_projection_is_called_under_the_lock_with_what_was_written(run: RunDir) -> None:
    calls: list[tuple[int, list[Event]]] = []
    run.append([JobChecked(plan={})], project=lambda record, new: calls.append((record.number, new)))
    assert calls[0][0] == 2 and calls[0][1] == run.events(after=1)


def row(step: int, loss: float, attempt: int = 1) -> MetricRow:
    zero = dict.fromkeys(MetricRow.model_fields, 0)
    return MetricRow.model_validate(zero | {"step": step, "loss": loss, "attempt": attempt})


def test_a_later_attempt_replaces_metrics_of_the_same_step(run: RunDir) -> None:
    for each in (row(10, 3.0), row(20, 2.0), row(20, 1.9, attempt=2), row(30, 1.0, attempt=2)):
        append_line(run.metrics_file, each)
    assert [(each.step, each.loss) for each in run.metrics()] == [(10, 3.0), (20, 1.9), (30, 1.0)]
    newest = last_row(run.metrics_file, MetricRow)
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
            raise OSError(errno.ENOSPC, "no space left on device")
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
