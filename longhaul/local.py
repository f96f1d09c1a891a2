"""`longhaul local`: Redis, service, five workers and publish in one terminal. The embedded default.

Everything listens on loopback. HOME is for this user's eyes alone: Redis is in HOME/redis, with every write on disk
before it is answered; logs are in HOME/logs. Each process is given the secrets that it needs (jobs/process/secrets.py).
Stopping asks the workers first (they have the trainer write a checkpoint), then publish, service and Redis.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO

from rich.console import Console

from jobs.process.lifeline import WARM
from jobs.process.secrets import NEEDED, minimal_environment
from jobs.text.units import format_duration
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.children import ChildFailed, ChildProcess, python, redis_binary
from longhaul.jobfile import BadInput

ROLES = ("check", "prepare", "train", "generate", "push", "publish")
READY_WITHIN_S = 120.0
TICK_S = 0.2
PUBLISH_GRACE_S = 30.0
REDIS_GRACE_S = 10.0


def run_local(
    environment: Mapping[str, str],
    console: Console,
    *,
    data: Path | None,
    home: Path,
    runs: Path | None,
    port: int | None,
) -> int:
    """Start everything, keep it running, stop it on Ctrl-C or SIGTERM. Exit code 1 when a part cannot be kept alive."""
    place = LocalHome(environment, data=data, home=home, runs=runs, port=port)
    with place.lock(), tempfile.TemporaryDirectory(prefix="longhaul-") as sockets:  # HOME may be too long a path
        stop = LocalStop()
        children = place.children(Path(sockets) / "warm")
        try:
            _start(children, place, stop, console)
            while not stop.asked:
                _tick(children, console)
                time.sleep(TICK_S)
        except ChildFailed as error:
            _say(console, f"giving up: {error}")
            return 1
        finally:
            _stop(children, stop, console)
    return 0


class LocalStop:
    """Counts Ctrl-C and SIGTERM: the first asks for an orderly end, the second for an immediate one."""

    def __init__(self) -> None:
        self.count = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1

    @property
    def asked(self) -> bool:
        """To stop."""
        return self.count > 0

    @property
    def urgent(self) -> bool:
        """To stop at once."""
        return self.count > 1


class LocalHome:
    """Folders, ports and the environment of the children."""

    def __init__(
        self, environment: Mapping[str, str], *, data: Path | None, home: Path, runs: Path | None, port: int | None
    ) -> None:
        if missing := [name for name in ("rq", "torch") if importlib.util.find_spec(name) is None]:
            raise BadInput(f"only the client is installed here, without {missing[0]}: run `make setup` in a clone")
        self.home = home.absolute()
        self.data = Path(data or environment.get("LONGHAUL_DATA") or "data").absolute()
        self.runs = Path(runs or environment.get("LONGHAUL_RUNS") or "runs").absolute()
        self.port = _port(port if port is not None else environment.get("LONGHAUL_PORT") or 8000)
        self.api_key = environment.get("LONGHAUL_API_KEY") or None
        self.made_data = not (data or environment.get("LONGHAUL_DATA") or self.data.exists())
        try:
            if self.made_data:
                self.data.mkdir()
            os.scandir(f"{self.data}/.").close()  # needs the right to list it and the right to open what is in it
        except FileNotFoundError:
            raise BadInput(f"the data directory {self.data} does not exist: create it, or give --data DIR") from None
        except OSError as error:
            raise BadInput(
                f"the data directory {self.data} cannot be {'created' if self.made_data else 'read'} "
                f"({error.strerror}): give another with --data DIR"
            ) from None
        self._redis_port = free_port()
        self._password = secrets.token_hex(16)
        device = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"
        self.environment = {
            **environment,
            "LONGHAUL_REDIS_URL": f"redis://:{self._password}@127.0.0.1:{self._redis_port}/0",
            "LONGHAUL_HOST": "127.0.0.1",
            "LONGHAUL_PORT": str(self.port),
            "LONGHAUL_DATA": str(self.data),
            "LONGHAUL_RUNS": str(self.runs),
            "LONGHAUL_UPLOADS": environment.get("LONGHAUL_UPLOADS") or str(self.home / "uploads"),
            "LONGHAUL_PREPARED": environment.get("LONGHAUL_PREPARED") or str(self.home / "prepared"),
            "LONGHAUL_MODELS": environment.get("LONGHAUL_MODELS") or str(self.home / "models"),
            "LONGHAUL_DEVICE": environment.get("LONGHAUL_DEVICE") or device,
        }

    @property
    def url(self) -> str:
        """Where the service answers."""
        return f"http://127.0.0.1:{self.port}"

    def lock(self) -> IO[bytes]:
        """The lock that keeps a second `longhaul local` out of this home; held until the file is closed."""
        try:
            self.runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(error, "--runs DIR") from None
        try:
            # A folder that holds other things as well stays open to those who use them: what is ours in it is not.
            ours = not self.home.exists() or (self.home / "redis").exists() or not any(self.home.iterdir())
            self.home.mkdir(parents=True, exist_ok=True)
            if ours:
                _own(self.home)
            for folder in (self.home / "logs", self.home / "redis"):
                folder.mkdir(mode=0o700, exist_ok=True)
            file = open(self.home / "lock", "ab")  # noqa: SIM115 - the caller closes it
        except OSError as error:
            raise cannot_write(error, "--home DIR") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BadInput(f"another `longhaul local` runs in {self.home}: stop it, or give --home DIR") from None
        return file

    def children(self, warm: Path) -> list[ChildProcess]:
        """Redis, what forks trainers (at the socket `warm`), service, workers and publish, in the order of starting."""
        logs = self.home / "logs"
        self.environment = {WARM: str(warm)} | self.environment
        commands = {
            "redis": [redis_binary(), str(self.home / "redis" / "redis.conf")],
            "warm": python("worker.training", "warm", str(warm)),
            "service": python("service"),
            **{role: python("worker", role) for role in ROLES},
        }
        children = [
            ChildProcess(name, command, minimal_environment(self.environment, NEEDED[name]), logs / f"{name}.log")
            for name, command in commands.items()
        ]
        redis, forks = children[:2]
        forks.needed = False  # without it trainers are started as any program
        forks.environment = {**forks.environment, "CUDA_VISIBLE_DEVICES": ""}  # what has used CUDA cannot fork
        if self.environment[WARM] != str(warm):
            children.remove(forks)  # there is one already
        redis.prepare, redis.place, redis.umask = self._redis_config, self.home / "redis", 0o077
        return children

    def _redis_config(self) -> None:
        """A file only this user can read: on a command line everybody on the machine could see the password."""
        folder = self.home / "redis"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "redis.conf"
        file.touch(mode=0o600)
        _own(folder, *folder.rglob("*"))
        lines = {
            "bind": "127.0.0.1",
            "port": self._redis_port,
            "requirepass": self._password,
            "dir": f'"{folder}"',
            "save": '""',
            "appendonly": "yes",
            "aof-use-rdb-preamble": "no",  # commands alone: Valkey and Redis 8 do not read each other's RDB
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
        }
        file.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))


def cannot_write(error: OSError, option: str) -> BadInput:
    """A folder that cannot be created or written: `option` names another."""
    return BadInput(f"{error.filename} cannot be written ({error.strerror}): give another folder with {option}")


def _own(*paths: Path) -> None:
    """Only this user may read them, whatever their mode was before."""
    for path in paths:
        if path.is_symlink():
            continue
        try:
            path.chmod(0o700 if path.is_dir() else 0o600)
        except FileNotFoundError:  # a temporary file of Redis that was there a moment ago
            continue
        except PermissionError:
            raise BadInput(f"{path} belongs to another user: give a --home DIR of your own") from None


def _start(children: list[ChildProcess], place: LocalHome, stop: LocalStop, console: Console) -> None:
    """All of them at once: each waits for Redis by itself. Returns when all have reported, or on a wish to stop."""
    for child in children:
        child.start()
    deadline = time.monotonic() + READY_WITHIN_S
    with Longhaul(place.url, place.api_key) as api:
        while not stop.asked:
            _tick(children, console)
            missing, sick = _missing(api, children)
            if not missing:
                break
            if time.monotonic() > deadline:
                raise ChildFailed(
                    f"not ready after {format_duration(READY_WITHIN_S)}: {', '.join(missing)}; logs: {place.home}/logs"
                )
            time.sleep(TICK_S)
        else:
            return
    for name, why in sick.items():
        _say(console, f"{name} takes no work: {why}")
    device = place.environment["LONGHAUL_DEVICE"]
    _say(
        console, f"Longhaul is up: open {place.url} in a browser (API: {place.url}/openapi.json). It trains on {device}"
    )
    new = " (new: put files of rows here)" if place.made_data else ""
    _say(console, f"  data  {place.data}{new}\n  runs  {place.runs}\n  logs  {place.home}/logs")
    url = "" if place.port == 8000 else f"LONGHAUL_URL={place.url} "
    _say(console, f"In another terminal: {url}longhaul submit FILE --watch. Ctrl-C here stops everything, in order.")


def _missing(api: Longhaul, children: list[ChildProcess]) -> tuple[list[str], dict[str, str | None]]:
    """What has not reported yet; and what has, but is not healthy, with its reason."""
    if not api.ready():
        return ["service"], {}
    try:
        workers = api.workers()["data"]
    except (ApiError, Unreachable):
        return ["service"], {}
    # By pid: heartbeats of the last start are remembered for a minute. (Being tied is an exec: the pid stays.)
    pids = {child.process.pid: child.name for child in children if child.process is not None}
    # Of several GPUs each has a child of the train worker.
    there = {
        name: worker
        for worker in workers
        if (name := pids.get(worker.get("pid") or 0) or pids.get(worker.get("parent_pid") or 0))
    }
    sick = {name: worker["why"] for name, worker in there.items() if not worker["healthy"]}
    return [role for role in ROLES if role not in there], sick


def _tick(children: list[ChildProcess], console: Console) -> None:
    for child in children:
        child.tick(lambda line: _say(console, line))


def _stop(children: list[ChildProcess], stop: LocalStop, console: Console) -> None:
    """Workers, then publish, service and Redis. The trainer has all the time it needs, until asked again."""
    named = {child.name: child for child in children}
    workers = [named[role] for role in ROLES if role != "publish"]
    if not stop.urgent:
        _say(console, "stopping: a running job writes a checkpoint first (press Ctrl-C again to stop at once)")
    for child in workers:
        child.terminate()
    while any(child.running() for child in workers) and not stop.urgent:
        time.sleep(TICK_S)
    for name, grace_s in (("publish", PUBLISH_GRACE_S), ("service", REDIS_GRACE_S), ("redis", REDIS_GRACE_S)):
        if stop.urgent:
            break
        named[name].terminate()
        named[name].wait(grace_s)
    for child in children:
        child.kill()
    _say(console, "stopped; waiting and running jobs continue at the next start")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


def _port(given: int | str) -> int:
    """The port, if it is one and free. Found out now, because the service would die of it again and again."""
    if not str(given).isdecimal() or not 1 <= int(given) <= 65_535:
        raise BadInput(f"{given!r} is not a port: give a number from 1 to 65535")
    port = int(given)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise BadInput(f"port {port} cannot be used ({error.strerror}): give another with --port") from None
    return port


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
