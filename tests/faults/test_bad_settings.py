"""What a new user gets wrong: said once, in one line, with what to do; never a traceback, never a retry."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from jobs.disk.files import unwritable
from jobs.errors import BadData, UserError
from jobs.redis.connection import connect
from jobs.redis.store import Store
from jobs.spec import parse_spec
from tests.support.stack import ROOT, Stack
from worker.settings import from_environment
from worker.training.dataset.split import split


def ended(environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """The process, at its end."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LONGHAUL_DEVICE", "gpu"),
        ("LONGHAUL_REDIS_URL", "localhost"),
        ("LONGHAUL_GPUS", "0,one"),
        ("LONGHAUL_TRIALS_AT_ONCE", "0"),
        ("LONGHAUL_BOX", "gpu 2"),
        ("LONGHAUL_PREPARE_MEMORY_GB", "much"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        from_environment(Stack(tmp_path, data=tmp_path).environment | {name: value})


def test_a_worker_with_a_wrong_setting_says_so_and_ends_with_2(tmp_path: Path) -> None:
    environment = Stack(tmp_path, data=tmp_path).environment | {"LONGHAUL_DEVICE": "gpu"}
    end = ended(environment, "worker", "train")
    assert end.returncode == 2 and "LONGHAUL_DEVICE" in end.stderr and "Traceback" not in end.stderr, end.stderr


@pytest.mark.parametrize("command", ["service", "worker check", "worker publish"])
def test_who_cannot_write_the_runs_says_so_in_one_line_and_ends_with_2(
    tmp_path: Path, redis_url: str, command: str
) -> None:
    (tmp_path / "file").touch()
    stack = Stack(tmp_path, data=tmp_path)
    environment = stack.environment | {"LONGHAUL_RUNS": f"{tmp_path}/file/runs", "LONGHAUL_REDIS_URL": redis_url}
    end = ended(environment, *command.split())
    assert end.returncode == 2 and "Traceback" not in end.stderr, end.stderr
    (said,) = [line for line in end.stderr.splitlines() if "cannot be written" in line]
    assert f"{tmp_path}/file is owned by {os.getuid()}:" in said and "name another place" in said
    if command != "service":
        health = ended(environment, *command.split(), "--healthy")
        assert health.returncode == 1 and "cannot be written" in health.stdout


def test_workers_whose_runs_go_away_say_so_until_they_are_back(tmp_path: Path) -> None:
    with Stack(tmp_path / "home", data=tmp_path) as stack:
        workers = Store(connect(stack.redis.url)).workers
        away = tmp_path / "away"

        def told(healthy: bool) -> set[str] | None:
            """What both say, once they are so."""
            found = [str(worker.why) for worker in workers.all() if worker.healthy is healthy]
            return set(found) if len(found) == 2 else None

        stack.start("check", "publish")
        stack.wait_for(lambda: told(True), "heartbeats")
        stack.runs.rename(away)
        stack.runs.touch()
        why = stack.wait_for(lambda: told(False), "a word on the folder")
        assert all(str(stack.runs) in each for each in why), "check may see first that these are other runs"
        assert any(
            "cannot be written" in each and f"{stack.runs} is owned by" in each and "name another place" in each
            for each in why
        )
        stack.runs.unlink()
        away.rename(stack.runs)
        assert stack.wait_for(lambda: told(True), "healthy workers") == {"None"}


def test_the_folder_of_somebody_else_is_named_with_its_owner_and_the_command_that_helps() -> None:
    # Docker with another UID than that of the folder. As root we become somebody else; others lose a right.
    me = 65534 if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
        owner = folder.stat()
        before = os.geteuid()
        os.seteuid(me)
        try:
            said = unwritable([folder / "runs"])
        finally:
            os.seteuid(before)
        helps = f"sudo chown -R {me}:{os.getegid()} {name}" if before == 0 else f"chmod u+rwx {name}"
        folder.chmod(0o755)
        assert said is not None and f"is owned by {owner.st_uid}:{owner.st_gid} with mode" in said
        assert f"this process runs as {me}:{os.getegid()}. What helps: {helps}" in said
        assert unwritable([folder / "runs"]) is None


@pytest.mark.parametrize("key", ["learning_rate", "epochs"])
def test_true_is_no_number(key: str) -> None:
    with pytest.raises(UserError, match=f"training.{key}"):
        parse_spec({"data": {"train": "rows.jsonl"}, "training": {key: True}})


def test_the_only_row_is_not_held_out_for_validation() -> None:
    with pytest.raises(BadData, match="none can be held out"):
        split(np.array([0], np.uint64), [1], 0.1)
