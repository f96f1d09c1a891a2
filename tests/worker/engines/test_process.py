"""A trainer on an engine as its supervisor sees it: Slurm's programs are fake, and so is the program on the node."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.disk.rundir import create
from jobs.events import AnyFact, AttemptEnded, JobCancelled, JobSubmitted, TaskStarted, TaskSubmitted, TaskWaiting
from jobs.reasons import Reason
from jobs.spec import parse_spec
from jobs.state import Stage
from tests.fake_slurm.slurm import FakeSlurm
from tests.sinks.driving import until
from tests.support.samples import RUNNING, write_plan
from tests.support.stack import ROOT
from worker.engines.engine import EngineRefused, EngineUnavailable, SharedStorage
from worker.engines.handover import Handover, Orders, TaskRecord
from worker.engines.left_task import LeftTasks
from worker.engines.process import EngineProcess
from worker.engines.registry import read_engines
from worker.trainer import Trainer

NODE = """#!/bin/bash
# What `python -m worker.engines.node RUN_DIR --attempt N --token TOKEN` leaves, with the code in the file `code`.
attempts=$3/attempts; report=$attempts/$5.node.json; token=$7
until [ -e {folder}/go ]; do sleep 0.02; done
say() {{ printf '{{"token": "%s", "host": "node-1", "code": %s}}' $token $1 > $report.new; mv $report.new $report; }}
say null
until [ -e {folder}/code ] || grep -q '"stop"\\|"kill"' $attempts/$5.orders.json; do sleep 0.02; done
if [ -e {folder}/mute ]; then echo "$(cat {folder}/mute)"; exit 9; fi
say $(cat {folder}/code 2>/dev/null || echo 75)
"""


class TrainingBox:
    """A run directory, and a Slurm on which it trains."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.folder, self.slurm = folder, slurm
        node = folder / "node"
        node.write_text(NODE.format(folder=folder))
        node.chmod(0o755)
        file = Path(slurm.environment(python=[str(node)], look_every_s=0.1)["LONGHAUL_ENGINES"])
        self.engines = read_engines(file)
        spec = parse_spec({"data": {"train": "rows.jsonl"}, "resources": {"engine": "cluster"}})
        submitted = JobSubmitted(name="tiny", model="m", spec_sha256="s")
        self.run, _ = create(folder / "runs", "job-1", spec, submitted)
        write_plan(self.run)

    def start(self, attempt: int = 1) -> EngineProcess:
        return EngineProcess(self.engines, "cluster", self.run, attempt, {"LONGHAUL_RUNS": "x"}, 1)

    def tell(self, what: str, words: str = "") -> None:
        (self.folder / what).write_text(words)

    def trainer(self) -> tuple[Trainer, EngineProcess]:
        """As the supervisor has it."""
        process = self.start()
        return Trainer(self.run, Stage.TRAIN, 1, lambda _arguments, _output: process), process

    def orders(self, attempt: int) -> Orders:
        orders = Handover(self.run.path, attempt).orders()
        assert orders is not None
        return orders

    def task(self, attempt: int) -> TaskRecord:
        task = Handover(self.run.path, attempt).task()
        assert task is not None
        return task

    def calls(self, *names: str) -> list[str]:
        """The first two words of lines of Slurm's log that begin with one of these."""
        return [" ".join(line.split()[:2]) for line in self.slurm.log() if line.split()[0] in names]


def told(process: EngineProcess, count: int) -> list[AnyFact]:
    """The next so many facts."""
    found: list[AnyFact] = []

    def look() -> bool:
        found.extend(process.facts())
        return len(found) >= count

    until(look)
    return found


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingBox]:
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("worker.engines.process.BEAT_S", 0.1)
    monkeypatch.setattr("worker.engines.process.LATE_S", 0.2)
    with FakeSlurm(tmp_path) as slurm:
        monkeypatch.setenv("PATH", slurm.environment()["PATH"])
        yield TrainingBox(tmp_path, slurm)


def test_a_task_from_queue_to_end(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    process = box.start()
    facts = told(process, 2)
    assert facts == [TaskSubmitted(engine="cluster", task="1"), TaskWaiting(task="1", message="PENDING (Resources)")]
    assert process.waiting and process.poll() is None
    assert box.task(1) == TaskRecord(
        engine="cluster", name=box.slurm.jobs()[0]["name"], token=box.orders(1).token, id="1"
    )
    before = box.orders(1).beat
    until(lambda: box.orders(1).beat > before)
    box.slurm.untell("hold")
    box.tell("go")
    assert told(process, 1) == [TaskStarted(task="1", node="node-1")] and not process.waiting
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0)
    box.tell("code", "76")
    assert process.wait(40) == 76 and process.cause is None
    assert box.task(1).over, "the trainer has said so"


def test_nothing_is_heard_of_what_waits_and_nothing_has_to_be(
    box: TrainingBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.trainer.SLOW_SILENCE_S", -1.0)
    box.slurm.tell("hold")
    trainer, process = box.trainer()
    trainer.read_lines()
    assert not trainer.stalled, "it is queued"
    box.slurm.untell("hold")
    box.tell("go")
    until(lambda: not process.waiting)
    assert trainer.stalled, "it runs, and has said nothing for too long"
    trainer.kill("stalled")
    assert trainer.end().reason is Reason.STALLED
    assert box.orders(1).order == "kill" and not box.task(1).over, "the next attempt looks whether it has ended"
    assert "scancel 1" in box.calls("scancel")


def test_the_silence_of_a_node_that_cannot_be_heard_says_nothing(
    box: TrainingBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bucket is away; then it is back, and the node has said nothing."""
    monkeypatch.setattr("worker.trainer.SLOW_SILENCE_S", -1.0)
    monkeypatch.setattr("worker.engines.handover.DEAF_S", 0.0)
    away = threading.Event()

    def pull(_storage: SharedStorage, _run: Path) -> bool:
        if away.is_set():
            raise EngineUnavailable("the bucket is away")
        return True

    monkeypatch.setattr(SharedStorage, "pull", pull)
    away.set()
    box.tell("go")
    trainer, process = box.trainer()
    until(lambda: process._node.report is not None)
    trainer.read_lines()
    assert not trainer.stalled, "it is not heard"
    monkeypatch.setattr("worker.engines.handover.DEAF_S", 1000.0)
    away.clear()
    until(lambda: trainer.stalled)
    box.tell("code", "0")
    assert trainer.wait(40)


def test_a_node_that_prepares_is_not_stalled(box: TrainingBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.trainer.SLOW_SILENCE_S", -1.0)
    trainer, process = box.trainer()
    until(lambda: not process._queued)
    assert process.waiting and not trainer.stalled, "it runs, and downloads its model"
    box.tell("go")
    until(lambda: trainer.stalled)
    box.tell("code", "0")
    assert trainer.wait(40)


def test_what_the_node_left_and_nobody_has_is_a_lost_worker(box: TrainingBox, monkeypatch: pytest.MonkeyPatch) -> None:
    box.tell("go")
    trainer, process = box.trainer()
    until(lambda: not process.waiting)

    def pull(_storage: SharedStorage, _run: Path) -> bool:
        raise EngineRefused("what its node left is not there: model")

    monkeypatch.setattr(SharedStorage, "pull", pull)
    assert trainer.wait(40)
    end = trainer.end()
    assert end.reason is Reason.WORKER_LOST and end.error is not None
    assert end.error.message == "the worker was lost: what its node left is not there: model"
    assert not box.task(1).over and "scancel 1" in box.calls("scancel")


def test_an_end_is_waited_with_until_all_is_here(box: TrainingBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says that the task is over while its model is still on its way."""
    here = threading.Event()
    monkeypatch.setattr(SharedStorage, "pull", lambda *_: here.is_set())
    box.tell("go")
    trainer, process = box.trainer()
    until(lambda: not process.waiting)
    box.slurm.end("1", "node_fail")
    asked = len(box.calls("squeue"))
    until(lambda: len(box.calls("squeue")) > asked + 6)
    assert process.poll() is None
    here.set()
    assert trainer.wait(40) and trainer.end().reason is Reason.WORKER_LOST


def test_a_task_that_the_engine_keeps_after_its_end_is_cancelled_and_not_over(
    box: TrainingBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engines.process.LEAVES_S", 0.0)
    box.tell("go")
    process = box.start()
    until(lambda: not process.waiting)
    box.slurm.state("1", "SUSPENDED")
    told_end = Handover(box.run.path, 1)
    report = told_end.report()
    assert report is not None
    told_end.write_report(report.model_copy(update={"code": 0}))
    assert process.wait(40) == 0
    assert "scancel 1" in box.calls("scancel") and not box.task(1).over


def test_what_waits_is_taken_back_when_it_is_to_stop(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    trainer, _ = box.trainer()
    until(lambda: box.slurm.jobs())
    trainer.ask_to_stop()
    assert trainer.wait(40)
    end = trainer.end()
    assert (end.reason, end.error) == (Reason.INTERRUPTED, None)
    assert box.slurm.jobs()[0]["state"] == "CANCELLED" and box.task(1).over


def test_a_stop_is_an_order_to_the_node(box: TrainingBox) -> None:
    box.tell("go")
    trainer, process = box.trainer()
    until(lambda: not process.waiting)
    trainer.ask_to_stop()
    assert trainer.wait(40) and process.poll() == 75 and trainer.end().reason is Reason.INTERRUPTED
    assert box.calls("scancel") == [], "it ended by itself"


@pytest.mark.parametrize(
    ("how", "reason", "words"),
    [
        ("node_fail", Reason.WORKER_LOST, "the worker was lost: cluster: NODE_FAIL"),
        ("oom", Reason.HOST_OUT_OF_MEMORY, ": cluster: OUT_OF_MEMORY"),
    ],
)
def test_an_end_without_a_word_is_explained_by_the_engine(
    box: TrainingBox, how: str, reason: Reason, words: str
) -> None:
    box.tell("go")
    trainer, process = box.trainer()
    until(lambda: not process.waiting)
    box.slurm.end("1", how)
    assert trainer.wait(40)
    end = trainer.end()
    assert end.reason is reason and end.error is not None and end.error.message.endswith(words)
    assert box.task(1).over


@pytest.mark.parametrize("state", ["CANCELLED", "BOOT_FAIL", "LAUNCH_FAILED"])
def test_what_the_engine_ends_while_it_waits_has_not_started(box: TrainingBox, state: str) -> None:
    box.slurm.tell("hold")
    trainer, _ = box.trainer()
    until(lambda: box.task(1).id == "1" if Handover(box.run.path, 1).task() else False)
    box.slurm.state("1", state)
    assert trainer.wait(40)
    end = trainer.end()
    assert end.reason is Reason.NOT_STARTED and end.error is not None
    assert end.error.message == f"the engine ended the task before it started: cluster: {state} (Resources)"


def test_a_program_that_cannot_start_is_a_crash_with_its_last_words(box: TrainingBox) -> None:
    box.tell("go")
    box.tell("mute", "bash: exec: python: \033[31mnot found hf_abcdefghijklmnopqrstuv")
    box.tell("code", "1")
    trainer, _ = box.trainer()
    assert trainer.wait(40)
    error = trainer.end().error
    assert error is not None and error.code == "crash"
    assert error.message == "the trainer crashed: cluster: FAILED: bash: exec: python: [31mnot found hf_***"


def test_a_task_that_slurm_has_forgotten_is_lost(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    box.slurm.tell("no-accounts")
    trainer, _ = box.trainer()
    until(lambda: box.slurm.jobs())
    until(lambda: box.task(1).id == "1")
    box.slurm.forget("1")
    assert trainer.wait(40) and trainer.end().reason is Reason.WORKER_LOST


def test_a_cluster_that_does_not_answer_ends_nothing(box: TrainingBox) -> None:
    box.tell("go")
    process = box.start()
    until(lambda: not process.waiting)
    box.slurm.tell("down")
    asked = len(box.slurm.log())
    until(lambda: len(box.slurm.log()) > asked + 2)
    assert process.poll() is None
    box.tell("code", "0")
    assert process.wait(40) == 0


def test_a_task_that_is_not_taken_may_not_train(box: TrainingBox) -> None:
    box.slurm.tell("refuse", "Batch job submission failed: Invalid qos specification")
    trainer, _ = box.trainer()
    assert trainer.wait(40)
    end = trainer.end()
    assert end.reason is Reason.NOT_SUBMITTED and end.error is not None
    assert "Invalid qos specification" in end.error.message and "LONGHAUL_ENGINES" in (end.error.hint or "")
    assert box.orders(1).order == "kill" and box.task(1).id is None and not box.task(1).over


def test_a_slow_engine_does_not_silence_the_box(box: TrainingBox) -> None:
    box.tell("go")
    process = box.start()
    until(lambda: not process.waiting)
    box.slurm.tell("hang")
    asked = len(box.calls("squeue"))
    until(lambda: len(box.calls("squeue")) > asked)
    before = box.orders(1).beat
    until(lambda: box.orders(1).beat > before + 3)
    assert len(box.calls("squeue")) == asked + 1, "it has not answered yet"
    box.slurm.untell("hang")
    box.tell("code", "0")
    assert process.wait(40) == 0


def test_a_task_that_was_suspended_starts_again(box: TrainingBox) -> None:
    box.tell("go")
    process = box.start()
    until(lambda: not process.waiting)
    told(process, 2)
    box.slurm.state("1", "SUSPENDED")
    assert told(process, 1) == [TaskWaiting(task="1", message="SUSPENDED")] and process.waiting
    box.slurm.state("1", "RUNNING")
    assert told(process, 1) == [TaskStarted(task="1", node="node-1")] and not process.waiting
    box.tell("code", "0")
    assert process.wait(40) == 0


def test_a_disk_that_fails_for_a_while_ends_nothing(box: TrainingBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the box: the id of the task is not taken, then the report of the node is torn."""
    write, fail = Handover.write_task, [False]

    def failing(self: Handover, task: TaskRecord) -> None:
        if fail[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        write(self, task)
        fail[0] = task.id is None

    monkeypatch.setattr(Handover, "write_task", failing)
    box.tell("go")
    process = box.start()
    until(lambda: not process.waiting)
    assert box.task(1).id is None
    fail[0] = False
    until(lambda: box.task(1).id == "1")
    report = box.run.path / "attempts" / "1.node.json"
    whole = report.read_bytes()
    report.write_bytes(whole[:9])
    before = box.orders(1).beat
    until(lambda: box.orders(1).beat > before + 2)
    assert process.poll() is None
    report.write_bytes(whole)
    box.tell("code", "0")
    assert process.wait(40) == 0
    assert [type(fact) for fact in process.facts()].count(TaskStarted) == 1


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, Reason.DISK_FULL), (errno.EIO, Reason.NOT_SUBMITTED)]
)  # fmt: skip
def test_a_disk_that_takes_nothing_before_a_task_is_handed_over(
    box: TrainingBox, monkeypatch: pytest.MonkeyPatch, number: int, reason: Reason
) -> None:
    def failing(_self: Handover, _task: TaskRecord) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Handover, "write_task", failing)
    trainer, _ = box.trainer()
    assert trainer.wait(40) and trainer.end().reason is reason
    assert box.slurm.jobs() == []


def test_what_nobody_expects_is_a_crash_and_the_task_is_cancelled(
    box: TrainingBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.slurm.tell("hold")

    def failing(_self: EngineProcess, _task: str, _before: object) -> None:
        raise ArithmeticError("no such thing")

    monkeypatch.setattr(EngineProcess, "_look", failing)
    trainer, _ = box.trainer()
    assert trainer.wait(40)
    end = trainer.end()
    assert end.reason is Reason.CRASH and end.error is not None and "ArithmeticError: no such" in end.error.message
    assert box.orders(1).order == "kill" and box.calls("scancel") == ["scancel 1"]


SUPERVISOR = """
import sys
import threading
from pathlib import Path
from jobs.disk.rundir import RunDir
from worker.engines.process import EngineProcess
from worker.engines.registry import read_engines
EngineProcess(read_engines(Path(sys.argv[1])), "cluster", RunDir(sys.argv[2]), 1, {}, 1).wait()
"""


def killed(box: TrainingBox, when: Callable[[], bool]) -> None:
    """A supervisor of attempt 1, and kill -9 at this moment."""
    command = [sys.executable, "-c", SUPERVISOR, str(box.folder / "engines.toml"), str(box.run.path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as supervisor:
        until(when)
        supervisor.kill()


# -- one after the other ----------------------------------------------------------------------------------------------


def test_the_next_attempt_begins_when_the_task_before_has_ended(box: TrainingBox) -> None:
    """The supervisor of the first died. Where the node's locks are not seen here, nothing else keeps the two apart."""
    box.tell("go")
    killed(box, lambda: Handover(box.run.path, 1).report() is not None)
    box.slurm.tell("down")
    second = box.start(attempt=2)
    [why] = told(second, 1)
    assert isinstance(why, TaskWaiting) and why.message.startswith("until it is known that the task of attempt 1 has")
    box.slurm.untell("down")
    until(lambda: not second.waiting)
    assert box.calls("start", "end") == ["start 1", "end 1", "start 2"]
    assert box.calls("sbatch", "end") == ["sbatch --parsable", "end 1", "sbatch --parsable"]
    assert box.orders(1).order == "kill" and box.task(1).over
    box.tell("code", "0")
    assert second.wait(40) == 0


def test_a_task_whose_id_was_lost_is_found_by_its_name(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    killed(box, lambda: (task := Handover(box.run.path, 1).task()) is not None and task.id == "1")
    Handover(box.run.path, 1).write_task(box.task(1).model_copy(update={"id": None}))
    second = box.start(attempt=2)
    until(lambda: len(box.slurm.jobs()) == 2)
    assert box.slurm.jobs()[0]["state"] == "CANCELLED"
    second.send_signal(signal.SIGTERM)
    assert second.wait(40) == -signal.SIGTERM


def test_a_job_that_is_to_stop_takes_back_what_was_left_before(box: TrainingBox) -> None:
    """Its supervisor was killed while the task waited; the next attempt is asked to stop at once."""
    box.slurm.tell("hold")
    killed(box, lambda: (task := Handover(box.run.path, 1).task()) is not None and task.id == "1")
    second = box.start(attempt=2)
    second.send_signal(signal.SIGTERM)
    assert second.wait(40) == -signal.SIGTERM
    until(lambda: box.slurm.jobs()[0]["state"] == "CANCELLED")
    assert box.orders(1).order == "kill" and len(box.slurm.jobs()) == 1


def test_an_engine_is_asked_now_and_then_how_a_task_before_is_and_cancels_it_once(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    killed(box, lambda: (task := Handover(box.run.path, 1).task()) is not None and task.id == "1")
    (box.slurm.bin / "scancel").write_text(f'#!/bin/sh\necho "scancel $1" >> {box.slurm.folder}/log\n')
    second = box.start(attempt=2)
    asked = len(box.calls("squeue"))
    until(lambda: len(box.calls("squeue")) > asked + 3)
    assert box.calls("scancel") == ["scancel 1"], "it takes its time"
    box.slurm.end("1", "cancel")
    until(lambda: len(box.slurm.jobs()) == 2)
    second.kill()
    second.wait(40)


def test_a_task_of_another_engine_is_ended_there_or_waited_for(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    killed(box, lambda: (task := Handover(box.run.path, 1).task()) is not None and task.id == "1")
    Handover(box.run.path, 1).write_task(box.task(1).model_copy(update={"engine": "old"}))
    second = box.start(attempt=2)
    [why] = told(second, 1)
    assert isinstance(why, TaskWaiting) and why.message == (
        "until LONGHAUL_ENGINES names the engine old again, on which a task of attempt 1 may still run"
    )
    assert box.calls("scancel") == [] and box.orders(1).order == "kill"
    second.send_signal(signal.SIGTERM)
    assert second.wait(40) == -signal.SIGTERM
    box.engines["old"] = box.engines["cluster"]
    third = box.start(attempt=3)
    until(lambda: len(box.slurm.jobs()) == 2)
    assert box.slurm.jobs()[0]["state"] == "CANCELLED"
    third.send_signal(signal.SIGTERM)
    third.wait(40)


@pytest.mark.parametrize("content", ["{", '{"engine": "cluster", "name": "n", "token": "t", "id": "--all"}'])
def test_a_file_of_a_task_that_cannot_be_read_stops_no_attempt_for_ever(
    box: TrainingBox, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("worker.engines.left_task.monotonic", lambda: now[0])
    box.tell("go")
    (box.run.path / "attempts" / "1.task.json").write_text(content)
    second = box.start(attempt=2)
    [why] = told(second, 1)
    assert isinstance(why, TaskWaiting) and why.message.startswith("until a task that nobody knows any more has ended")
    assert box.orders(1).order == "kill" and box.calls("scancel") == []
    now[0] = 601.0
    until(lambda: not second.waiting)
    box.tell("code", "0")
    assert second.wait(40) == 0


def test_tasks_of_jobs_that_do_not_run_are_ended(box: TrainingBox) -> None:
    """The supervisor was killed while the task waited, then the job was cancelled: no attempt follows."""
    box.slurm.tell("hold")
    box.run.append(RUNNING)
    killed(box, lambda: (task := Handover(box.run.path, 1).task()) is not None and task.id == "1")
    left = LeftTasks(box.run.path.parent, box.engines)
    left.end()
    assert box.calls("scancel") == [], "it runs"
    box.run.append([AttemptEnded(reason=Reason.WORKER_LOST, step=0), JobCancelled(checkpoint=None)])
    left.end()
    until(lambda: box.slurm.jobs()[0]["state"] == "CANCELLED")
    left.end()
    assert box.task(1).over and box.calls("scancel") == ["scancel 1"]


def test_the_task_has_no_secret_and_no_more_than_it_needs(box: TrainingBox) -> None:
    box.slurm.tell("hold")
    process = box.start()
    until(lambda: box.slurm.jobs())
    script = (box.slurm.folder / "1.sh").read_text()
    exported = [line.split("=")[0] for line in script.splitlines() if line.startswith("export ")]
    assert exported == ["export LONGHAUL_DEVICE", "export LONGHAUL_RUNS", "export OMP_NUM_THREADS"]
    assert json.loads((box.run.path / "attempts" / "1.task.json").read_text())["token"] in script
    process.send_signal(signal.SIGTERM)
    process.wait(40)
