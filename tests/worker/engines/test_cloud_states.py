"""What SkyPilot says of a task, and what it means here. `sky` is a script that says it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from worker.engines.engine import EngineRefused, EngineTask, EngineUnavailable, TaskState, TaskStatus
from worker.engines.skypilot import SkyPilot, SkyPilotSettings

S = TaskStatus
GIVEN = {"name": "cloud", "device": "cpu", "directory": Path("/app"), "python": ("python",)}


class Programs:
    """A folder of scripts in front of PATH. Each notes its words in `called`, and answers by the first of these."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def answer(self, program: str, answers: dict[str, str], code: int = 0, error: str = "") -> None:
        cases = ""
        for number, (words, said) in enumerate(answers.items()):
            (self.folder / f"{program}.{number}").write_text(said)
            cases += f'*"{words}"*) cat {self.folder}/{program}.{number};;\n'
        file = self.folder / program
        file.write_text(
            f'#!/bin/sh\necho "$*" >> {self.folder}/called\n[ -n "{error}" ] && echo "{error}" >&2\n'
            f'case "$*" in\n{cases}esac\nexit {code}\n'
        )
        file.chmod(0o755)

    def called(self) -> list[str]:
        return (self.folder / "called").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    return Programs(tmp_path, monkeypatch)


@pytest.fixture
def sky(tmp_path: Path) -> SkyPilot:
    return SkyPilotSettings.model_validate({**GIVEN, "kind": "skypilot", "bucket": f"file://{tmp_path}/b"}).connect()


@pytest.fixture
def task() -> EngineTask:
    return EngineTask(
        job="job-1", attempt=1, name="longhaul-1-1-00000000", command=("python",), environment={}, gpus=0,
        run=Path("/runs/job-1"), directory=Path("/app"), stores=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("PENDING", S.QUEUED), ("STARTING", S.QUEUED), ("RUNNING", S.RUNNING), ("CANCELLING", S.RUNNING),
        ("SUCCEEDED", S.ENDED), ("CANCELLED", S.PREEMPTED), ("FAILED", S.FAILED), ("FAILED_SETUP", S.FAILED),
        ("FAILED_NO_RESOURCE", S.PREEMPTED), ("FAILED_CONTROLLER", S.PREEMPTED),
    ],
)  # fmt: skip
def test_states_of_skypilot(programs: Programs, sky: SkyPilot, said: str, means: TaskStatus) -> None:
    jobs = [
        {"job_name": "other", "status": "RUNNING"},
        {"job_name": "t", "status": said, "details": "a\nb", "task_id": 0},
    ]
    programs.answer("sky", {"jobs queue": f"[warning]\n{json.dumps(jobs, indent=2)}\n"})
    assert sky.state("t") == TaskState(means, f"{said} (a b)")
    assert sky.find("t") == "t"


def test_a_state_of_skypilot_that_is_not_known_is_no_end(programs: Programs, sky: SkyPilot) -> None:
    programs.answer("sky", {"jobs queue": json.dumps([{"job_name": "t", "status": "SOMETHING_NEW"}], indent=2)})
    with pytest.raises(EngineUnavailable, match="'SOMETHING_NEW', a state that is not known here"):
        sky.state("t")


def test_skypilot_cancels_what_it_would_start_again(programs: Programs, sky: SkyPilot) -> None:
    programs.answer("sky", {"jobs queue": json.dumps([{"job_name": "t", "status": "RECOVERING"}], indent=2)})
    assert sky.state("t").status is S.RUNNING
    assert programs.called()[-1] == "jobs cancel --yes --name t"


def test_skypilot_does_not_know_a_task_or_does_not_answer(programs: Programs, sky: SkyPilot, task: EngineTask) -> None:
    programs.answer("sky", {"jobs queue": "[]\n"})
    assert sky.state("t").status is S.GONE and sky.find("t") is None
    stopped = "No in-progress managed jobs. (See finished managed jobs: sky jobs queue --refresh)"
    for code in (0, 1):
        programs.answer("sky", {"jobs queue": stopped}, code=code)
        assert sky.state("t").status is S.GONE and sky.find("t") is None, (
            "its controller has nothing to do, and stopped"
        )
    programs.answer("sky", {"jobs queue": "Traceback"})
    with pytest.raises(EngineUnavailable, match="not understood"):
        sky.state("t")
    programs.answer("sky", {"logs": "its last words\n"}, code=100, error="no cluster")
    assert sky.logs("t") == "its last words\n"
    for call in (sky.state, sky.find, sky.cancel):
        with pytest.raises(EngineUnavailable, match="no cluster"):
            call("t")
    with pytest.raises(EngineRefused, match="no cluster"):
        sky.submit(task)
