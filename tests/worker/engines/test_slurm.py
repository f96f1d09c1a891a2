"""Slurm: the script, its programs, and what each state means."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_slurm.slurm import FakeSlurm
from tests.sinks.driving import until
from worker.engines.engine import EngineRefused, EngineTask, EngineUnavailable, TaskState, TaskStatus
from worker.engines.slurm import STATES, Slurm, SlurmSettings

DOCUMENTED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED",
    "RUNNING", "SUSPENDED", "TIMEOUT", "COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE",
    "RECONFIG_FAIL", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING",
    "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "UPDATE_DB",
)  # fmt: skip
"""Slurm's page "Job State Codes": base states, then flags."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    with FakeSlurm(tmp_path) as fake:
        monkeypatch.setenv("PATH", fake.environment()["PATH"])
        yield fake


def settings(**more: object) -> SlurmSettings:
    """On CPUs."""
    known = {"name": "cluster", "kind": "slurm", "device": "cpu", "directory": "/tmp", "python": [sys.executable]}
    return SlurmSettings.model_validate({**known, **more}, strict=False)


def task(tmp_path: Path, *command: str, **more: object) -> EngineTask:
    """One that runs this command."""
    (tmp_path / "attempts").mkdir(exist_ok=True)
    known = EngineTask(
        job="job-1", attempt=2, name="longhaul-1-2-abcd", command=command, environment={"B": "two words", "A": "it's"},
        gpus=0, run=tmp_path, directory=tmp_path, stores=(),
    )  # fmt: skip
    return replace(known, **more)  # type: ignore[arg-type]  # a test's own keywords


def test_the_script_has_what_the_task_needs_and_quotes_it(tmp_path: Path) -> None:
    asked = settings(
        partition="gpu", account="lab", qos="long", time="12:00:00", notice_s=300, cpus=8, memory="64G",
        sbatch=["--constraint=a100"],
    )  # fmt: skip
    run = tmp_path / "100% mine"
    run.mkdir()
    script = Slurm(asked).render(task(run, "python", "-m", "x y", "$HOME", gpus=4))
    assert script == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=longhaul-1-2-abcd\n"
        f'#SBATCH --output="{tmp_path}/100%% mine/attempts/2.slurm.log"\n'
        "#SBATCH --open-mode=append\n"
        f'#SBATCH --chdir="{run}"\n'
        "#SBATCH --export=NONE\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH --ntasks=1\n"
        "#SBATCH --signal=B:TERM@300\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --account=lab\n"
        "#SBATCH --qos=long\n"
        "#SBATCH --time=12:00:00\n"
        "#SBATCH --cpus-per-task=8\n"
        "#SBATCH --mem=64G\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH --no-requeue\n"
        "#SBATCH --constraint=a100\n"
        "unset SLURM_EXPORT_ENV\n"
        "export A='it'\"'\"'s'\n"
        "export B='two words'\n"
        "exec python -m 'x y' '$HOME'\n"
    )


def test_every_documented_state_is_one_of_ours() -> None:
    assert sorted(STATES) == sorted(DOCUMENTED)
    running = {state for state, ours in STATES.items() if ours is TaskStatus.RUNNING}
    assert running == {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "UPDATE_DB"}
    assert {state for state, ours in STATES.items() if ours is TaskStatus.FAILED} == {"FAILED"}


def test_a_task_from_its_submission_to_its_end(tmp_path: Path, slurm: FakeSlurm) -> None:
    engine = Slurm(settings())
    seen = tmp_path / "seen"
    number = engine.submit(task(tmp_path, "sh", "-c", f'echo "$A, $B" > {seen}; echo bye; exit 3'))
    until(lambda: engine.state(number).status.over)
    assert seen.read_text() == "it's, two words\n"
    assert engine.state(number) == TaskState(TaskStatus.FAILED, "FAILED")
    assert engine.logs(number) == "bye\n"
    slurm.forget(number)
    assert engine.state(number) == TaskState(TaskStatus.FAILED, "FAILED (exit code 3:0)"), "from the accounting"
    slurm.tell("no-accounts")
    assert engine.state(number).status is TaskStatus.GONE
    engine.cancel(number)


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "A_NEW_ONE", ""])
def test_what_has_left_the_queue_is_over_whatever_the_accounts_say(
    tmp_path: Path, slurm: FakeSlurm, state: str
) -> None:
    (slurm.folder / "accounts").mkdir()
    (slurm.folder / "accounts" / "7.json").write_text(json.dumps({"state": state, "code": "0:0"}))
    assert Slurm(settings()).state("7").status is TaskStatus.GONE


def test_what_has_left_the_queue_is_over_where_there_is_no_sacct(slurm: FakeSlurm) -> None:
    (slurm.bin / "sacct").unlink()
    assert Slurm(settings()).state("7") == TaskState(
        TaskStatus.GONE, "not in the queue any more, and there is no sacct here"
    )


def test_a_state_that_is_not_known_is_no_end(tmp_path: Path, slurm: FakeSlurm) -> None:
    engine = Slurm(settings())
    slurm.tell("hold")
    number = engine.submit(task(tmp_path, "true"))
    job = slurm.jobs()[0]
    (slurm.folder / f"{number}.json").write_text(json.dumps(job | {"state": "A_NEW_ONE"}))
    with pytest.raises(EngineUnavailable, match="squeue says 'A_NEW_ONE', a state that is not known here"):
        engine.state(number)
    (slurm.folder / f"{number}.json").write_text(json.dumps(job))


def test_a_task_that_waits_is_found_by_its_name_and_taken_back(tmp_path: Path, slurm: FakeSlurm) -> None:
    engine, asked = Slurm(settings()), task(tmp_path, "true")
    slurm.tell("hold")
    number = engine.submit(asked)
    assert engine.state(number) == TaskState(TaskStatus.QUEUED, "PENDING (Resources)")
    assert engine.find(asked.name) == number and engine.find("another") is None
    engine.cancel(number)
    until(lambda: engine.state(number).status.over)
    assert engine.state(number).status is TaskStatus.PREEMPTED and engine.find(asked.name) is None
    slurm.forget(number)
    assert engine.state(number) == TaskState(TaskStatus.PREEMPTED, "CANCELLED (exit code 0:0)")
    engine.cancel("999")


def test_a_refusal_is_told_from_an_outage(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Slurm(settings())
    slurm.tell("refuse", "Batch job submission failed: Invalid account")
    with pytest.raises(EngineRefused, match=r"sbatch ended with code 1: sbatch: error: Batch job .* Invalid account"):
        engine.submit(task(tmp_path, "true"))
    slurm.tell("down")
    for call in (lambda: engine.state("1"), lambda: engine.find("a"), lambda: engine.cancel("1")):
        with pytest.raises(EngineUnavailable, match="Unable to contact slurm controller"):
            call()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineUnavailable, match="sbatch is not in the PATH"):
        engine.submit(task(tmp_path, "true"))


def test_of_the_output_the_end_is_read_and_no_other_file(tmp_path: Path, slurm: FakeSlurm) -> None:
    engine = Slurm(settings())
    slurm.tell("hold")
    number = engine.submit(task(tmp_path, "true"))
    output = tmp_path / "attempts" / "2.slurm.log"
    output.write_text("x" * 2**20 + "\nbye\n")
    assert engine.logs(number) == "x" * (65_536 - 5) + "\nbye\n"
    output.unlink()
    (tmp_path / "other").write_text("not yours")
    output.symlink_to(tmp_path / "other")
    assert engine.logs(number) == ""
    output.unlink()
    os.mkfifo(output)
    assert engine.logs(number) == ""


def test_nothing_secret_reaches_the_programs(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_REDIS_URL", "redis://:p4ssword@127.0.0.1")
    for name in ("SBATCH_EXPORT", "SQUEUE_FORMAT", "SACCT_FORMAT", "SLURM_CLUSTERS", "SLURM_CONF"):
        monkeypatch.setenv(name, "ALL")
    (slurm.bin / "sbatch").write_text(f"#!/bin/sh\nenv > {tmp_path}/env\necho 7\n")
    assert Slurm(settings()).submit(task(tmp_path, "true")) == "7"
    env = (tmp_path / "env").read_text()
    assert "p4ssword" not in env
    assert re.findall(r"^(?:SBATCH|SQUEUE|SACCT|SLURM)_\w+", env, re.MULTILINE) == ["SLURM_CONF"], (
        "nothing overrides the script"
    )
