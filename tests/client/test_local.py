"""`longhaul local`: up, a dead part comes back, an orderly end, and nobody outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from client.api import Longhaul
from client.local import ROLES
from client.main import main
from jobs.lifeline import tied
from tests.redis_server import free_port

ROOT = Path(__file__).resolve().parents[2]


class Local:
    """A running `longhaul local`."""

    def __init__(self, folder: Path) -> None:
        (folder / "data").mkdir(exist_ok=True)
        self.folder = folder
        self.port = free_port()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "LONGHAUL_DEVICE": "cpu"}
        with open(folder / "out", "wb") as out:
            self.process = subprocess.Popen(
                tied(sys.executable, "-m", "client.main", "local", "--port", str(self.port)),
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.api = Longhaul(f"http://127.0.0.1:{self.port}")
        until(lambda: "Longhaul is up" in self.output(), self.output)

    def output(self) -> str:
        return (self.folder / "out").read_text()

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def workers(self, stage: str) -> set[int]:
        """Pids heard of in the last minute."""
        return {worker["pid"] for worker in self.api.workers()["data"] if worker["stage"] == stage}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until(condition: Callable[[], object], say: Callable[[], str], within_s: float = 40) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_up_a_dead_part_comes_back_an_orderly_end_and_a_violent_one(tmp_path: Path) -> None:
    local = Local(tmp_path)
    with local.api as api:
        assert {worker["stage"] for worker in api.workers()["data"]} == set(ROLES)
        assert (tmp_path / ".longhaul" / "redis" / "redis.conf").stat().st_mode & 0o077 == 0
        password = (tmp_path / ".longhaul" / "redis" / "redis.conf").read_text().split("requirepass ")[1].split()[0]
        children = local.children()
        assert len(children) == 6
        for child in children:
            assert password not in Path(f"/proc/{child}/cmdline").read_text()
        [before] = local.workers("prepare")
        os.kill(before, signal.SIGKILL)
        until(lambda: local.workers("prepare") - {before}, local.output)
        assert "prepare was killed by signal 9; again in 1 s" in local.output()
        job = api.submit({"model": "builtin:t5-tiny", "data": {"train": "nothing.jsonl"}})["id"]
        children = local.children()
        local.process.terminate()
        assert local.process.wait(60) == 0
        assert "stopped;" in local.output()
        assert not any(alive(child) for child in children)

    again = Local(tmp_path)  # what was in Redis is still there
    with again.api as api:
        assert api.get(job)["id"] == job
        family = again.children()
        family += [grandchild for child in family for grandchild in children_of(child)]
        again.process.kill()
        again.process.wait()
        until(lambda: not any(alive(each) for each in family), lambda: "somebody outlived its parent", 10)


def test_it_says_what_is_wrong_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["local"]) == 2
    assert "--data DIR" in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    assert main(["local", "--port", "99999"]) == 2
    assert "not a port" in capsys.readouterr().err
    assert not (tmp_path / ".longhaul").exists()
