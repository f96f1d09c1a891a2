"""What is said of a trainer that could not say itself why it ended."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.attempt import Finished, Heartbeat
from jobs.disk.files import append_line
from jobs.disk.rundir import create
from jobs.events import JobSubmitted
from jobs.reasons import Reason
from jobs.spec import parse_spec
from jobs.state import Stage
from jobs.trainer_facts import Fault
from tests.support.machine import Clock
from worker.trainer import SILENCE_S, Trainer, here
from worker.warm import OwnProcess


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('CUDA error: unknown')", "(exit code 1): RuntimeError: CUDA error: unknown"),
        ("faulthandler.enable(); os.abort()", "(signal SIGABRT): Fatal Python error: Aborted"),
    ],
)
def test_a_crash_is_explained_by_an_error_or_by_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    error = end_of(tmp_path, monkeypatch, code).error
    assert error is not None and error.message.endswith(message), error


def end_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, stage: Stage = Stage.CHECK) -> Finished:
    """Of a trainer that logs a line, then does that."""
    program = tmp_path / "trainer"
    program.write_text(
        f"#!{sys.executable}\nimport faulthandler, logging, os, signal\n"
        "logging.basicConfig(level='INFO', format='%(asctime)s %(levelname)s %(message)s')\n"
        f"logging.info('step 1200: validation loss 3.0384')\n{code}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="tiny", model="m", spec_sha256="s"))
    trainer = Trainer(run, stage, 1 if stage is Stage.TRAIN else None, here(os.environ))
    assert trainer.wait(60)
    return trainer.end()


KILLED = "something other than Longhaul killed the trainer (signal SIGKILL, phase step, step 570); "


@pytest.mark.parametrize(
    ("counted", "reason", "says"),
    [
        (True, Reason.HOST_OUT_OF_MEMORY, "the host's memory ran out and the kernel ended the "
         "trainer (phase step, step 570)"),
        (False, Reason.KILLED, KILLED + "the kernel ended no process for want of memory meanwhile, "
         "so a person or another program did it"),
        (None, Reason.KILLED, KILLED + "whether the kernel did it for want of memory cannot be seen here"),
    ],
)  # fmt: skip
def test_who_killed_a_trainer_is_told_as_far_as_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool | None, reason: Reason, says: str
) -> None:
    # The count of the kernel: 3 long before, in between 1 more, and `counted` once the trainer is gone.
    counts = [3, 3, 4, 4, 4]
    monkeypatch.setattr("worker.trainer.oom_kills", lambda: counts.pop(0))
    monkeypatch.setattr("worker.trainer.ended_for_memory", lambda before: counted if before == 4 else True)
    monkeypatch.setattr("worker.trainer.LOOK_AT_HOST_S", 0.0)
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="tiny", model="m", spec_sha256="s"))
    run.attempt_file(1).parent.mkdir(exist_ok=True)
    process = OwnProcess(["sleep", "600"], process_group=0)
    trainer = Trainer(run, Stage.TRAIN, 1, lambda *_: process)
    for step in (568, 569, 570):  # each is written after the look at the one before
        append_line(run.attempt_file(1), Heartbeat(at=0.0, phase="step", step=step, interval_s=0.1))
        trainer.read_lines()
    os.kill(process.pid, 9)
    assert trainer.wait(60)
    end = trainer.end()
    assert end.reason is reason and end.error is not None
    told, held, _ = end.error.message.partition("; the trainer had ")
    assert told == says and held
    assert re.fullmatch(r".*; the trainer had 0\.0\d* GiB of the [\d,.]+ GiB that all processes here may have|"
                        r".*; the trainer had [\d,]+ MiB of the [\d,]+ MiB that all processes here may have",
                        end.error.message), end.error.message  # fmt: skip
    assert end.error.hint == reason.hint


@pytest.mark.parametrize(("number", "code"), [("SIGPROF", "chat_template"), ("SIGXCPU", "cpu_limit")])
def test_a_limit_that_the_kernel_has_kept_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, code: str
) -> None:
    end = end_of(tmp_path, monkeypatch, f"os.kill(os.getpid(), signal.{number})")
    assert (end.reason, end.error and end.error.code) == (Reason.REJECTED, code)


def test_a_limit_of_the_machine_that_ends_training_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = end_of(tmp_path, monkeypatch, "os.kill(os.getpid(), signal.SIGXCPU)", Stage.TRAIN)
    assert end.reason is Reason.CRASH


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("from os import no_such_name", "ImportError: cannot import name 'no_such_name' from 'os'"),
    ],
)
def test_a_library_that_cannot_be_imported_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    end = end_of(tmp_path, monkeypatch, code)
    assert end.reason is Reason.IMPORT_FAILED and end.error is not None
    assert end.error.message.startswith(f"a library cannot be imported: {message}")
    assert "make setup" in str(end.error.hint)


def test_a_folder_that_was_away_is_no_silence_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.0)
    monkeypatch.setattr("worker.trainer.time", SimpleNamespace(time=time.time, monotonic=clock))
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="tiny", model="m", spec_sha256="s"))
    run.attempt_file(1).parent.mkdir(exist_ok=True)
    trainer = Trainer(run, Stage.TRAIN, 1, lambda *_: OwnProcess(["sleep", "600"], process_group=0))
    append_line(run.attempt_file(1), Heartbeat(at=0.0, phase="step", step=5, interval_s=0.1))
    trainer.read_lines()
    clock.now += 600  # supervisor and trainer wait for the folder
    trainer.read_lines()
    away = trainer.stalled
    silent_s = 0.0
    while not trainer.stalled and silent_s < 3600:
        clock.now += 5
        silent_s += 5
        trainer.read_lines()
    trainer.kill("stalled")
    assert not away and silent_s == SILENCE_S + 5


@pytest.mark.parametrize("reason", [Reason.OOM_IN_OPTIMIZER, Reason.CRASH])
def test_of_several_gpus_the_rank_that_knows_says_why_it_ended(tmp_path: Path, reason: Reason) -> None:
    spec = parse_spec({"data": {"train": "rows.jsonl"}})
    run, _ = create(tmp_path, "job-1", spec, JobSubmitted(name="tiny", model="m", spec_sha256="s"))
    run.attempt_file(1).parent.mkdir(exist_ok=True)
    trainer = Trainer(run, Stage.TRAIN, 1, lambda *_: OwnProcess(["sleep", "600"], process_group=0))
    error = Fault(code=reason.value, message="memory ran out", hint="a smaller model")
    append_line(run.attempt_file("1-rank-1"), Finished(at=1.0, reason=Reason.INTERRUPTED))
    append_line(run.attempt_file("1-rank-2"), Finished(at=1.0, reason=reason, error=error))
    trainer.kill("stalled")
    end = trainer.end()
    assert end.error is not None
    if reason is Reason.CRASH:
        assert end.reason is Reason.STALLED, "which may have come of the end of rank 0"
    else:
        assert (end.reason, end.error.message, end.error.hint) == (reason, "rank 2: memory ran out", "a smaller model")
