"""A trainer whose attempt is over ends before its next write; each is a process, for that is what ends."""

from __future__ import annotations

import os
import zlib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from jobs.disk.files import regular
from jobs.disk.rundir import RunDir, create
from jobs.events import AttemptEnded, AttemptStarted, JobQueued, JobSubmitted
from jobs.reasons import Reason
from jobs.spec import parse_spec
from tests.support.samples import checked, prepared
from tests.training import fenced_writes
from tests.training.fenced_writes import take_over
from tests.training.forked import fork
from worker.training.checkpoints.pruning import clean
from worker.training.journal import EXIT_CODE, end_if_over


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A job in its first attempt."""
    spec = parse_spec({"model": "builtin:t5-tiny", "data": {"train": "rows.jsonl"}})
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="n", model=spec.model, spec_sha256=spec.sha256()))
    run.append([checked(), prepared(9), JobQueued()])
    run.append([AttemptStarted(worker="train-one", device="cpu")])
    return run


def written(run: RunDir) -> set[str]:
    """Files beside events and specification."""
    known = {run.events_file, run.spec_file, run.events_file.with_name("events.lock")}
    return {str(file.relative_to(run.path)) for file in run.path.rglob("*") if file.is_file() and file not in known}


def write(what: str, run: RunDir) -> tuple[int, str]:
    """Exit code and log of a trainer that does."""
    code, _, said = fork(lambda: fenced_writes.main(what, run)).wait()
    return code, said


WRITES = {
    "heartbeat": {"attempts/1.jsonl"},
    "metrics": {"metrics.jsonl"},
    "checkpoint": {
        f"checkpoints/step-00000001/{name}"
        for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
    },
}


@pytest.mark.parametrize("what", WRITES)
def test_each_write_is_made_by_the_open_attempt_alone(run: RunDir, what: str) -> None:
    take_over(run)
    code, said = write(what, run)
    assert code == EXIT_CODE and "attempt 1 is over (attempt 2 has begun)" in said, said
    assert written(run) == set()


@pytest.mark.parametrize("what", WRITES)
def test_the_open_attempt_writes(run: RunDir, what: str) -> None:
    assert write(what, run) == (0, "") and written(run) == WRITES[what]


def test_an_attempt_that_was_given_up_is_over_before_the_next_one_begins(run: RunDir) -> None:
    run.append([AttemptEnded(reason=Reason.WORKER_LOST), JobQueued()])
    code, said = write("heartbeat", run)
    assert code == EXIT_CODE and "it was given up" in said and written(run) == set()


def test_a_checkpoint_during_which_another_attempt_begins_gets_no_name(run: RunDir) -> None:
    code, _ = write("during", run)
    (left,) = written(run)
    assert code == EXIT_CODE and fnmatch(left, "checkpoints/tmp-step-00000001-*/model.safetensors")


def test_an_attempt_that_is_over_leaves_what_the_next_one_is_saving(run: RunDir) -> None:
    code, said = write("stale", run)
    assert code == EXIT_CODE and "attempt 2 has begun" in said, said
    assert len(written(run)) == 2, "of the same step, by either attempt"
    clean(run)
    assert written(run) == set()


def test_events_that_cannot_be_read_fence_nobody_off(run: RunDir) -> None:
    with open(run.events_file, "ab") as file:
        file.write(b"damage\n")
    assert write("heartbeat", run) == (0, "") and written(run) == {"attempts/1.jsonl"}


def test_the_server_is_asked_by_opening_the_events_for_writing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []

    def noted(path: str, how: int) -> int:
        flags.append(how & os.O_ACCMODE)
        return regular(path, how)

    monkeypatch.setattr("jobs.disk.event_log.regular", noted)
    end_if_over(run, 1)
    assert flags == [os.O_RDWR]


def test_an_event_of_a_newer_version_ends_the_attempt(run: RunDir) -> None:
    last = run.events()[-1]
    line = last.model_copy(update={"number": last.number + 1}).model_dump_json().replace("attempt.started", "job.newer")
    with open(run.events_file, "ab") as file:
        file.write(line[:-1].encode() + b',"crc":"%08x"}\n' % zlib.crc32(line.encode()))
    code, said = write("heartbeat", run)
    assert code == EXIT_CODE and "a newer version of Longhaul wrote it" in said and written(run) == set()
