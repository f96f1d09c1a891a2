"""`longhaul local`: up, a dead part comes back, an orderly end, and nobody outlives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from client.local import ROLES
from client.main import main
from tests.local import Local, children_of, until


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_up_a_dead_part_comes_back_an_orderly_end_and_a_violent_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with Local(tmp_path) as local:
        assert {worker["stage"] for worker in local.api.workers()["data"]} == set(ROLES)
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
        job = local.api.submit({"model": "builtin:t5-tiny", "data": {"train": "nothing.jsonl"}})["id"]
        children = local.children()
        local.process.terminate()
        assert local.process.wait(60) == 0
        assert "stopped;" in local.output()
        assert not any(alive(child) for child in children)

    with Local(tmp_path) as again:  # what was in Redis is still there
        assert again.api.get(job)["id"] == job
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
