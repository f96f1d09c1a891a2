"""The containers under test: a Docker engine, and the unmodified compose file brought up in a folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import requests

from jobs.disk.rundir import RunDir
from jobs.text.units import format_duration
from tests.support.redis_server import free_port

ROOT = Path(__file__).parents[2]
ENGINE = ROOT.parent / "shared" / "docker" / "engine"
COMPOSE_FILE = "docker-compose.training.yml"
SENT = (
    "Dockerfile.training", COMPOSE_FILE, "docker-compose.cpu.yml", "docker-compose.cdi.yml",
    ".dockerignore", ".env.example", "Makefile", "pyproject.toml",
    "requirements.cuda.lock", "requirements.lock", "requirements.service.lock", "jobs", "service", "worker", "longhaul",
)  # fmt: skip
OURS = ("service", "prepare", "worker", "generate", "publish")
Found = TypeVar("Found")


def example(**changes: Any) -> dict[str, Any]:
    """The example job with short texts and a schedule of a few seconds."""
    spec: dict[str, Any] = json.loads((ROOT / "examples" / "job.json").read_text())
    spec["data"] |= {"max_input_tokens": 32, "max_target_tokens": 32}
    spec["training"] = {"epochs": 1, "batch_size": 64}
    spec["evaluation"] = {"samples": 1}
    spec["log"] = {"every_steps": 1}
    return spec | changes


def few(**changes: Any) -> dict[str, Any]:
    """The same on 64 rows."""
    spec = example(**changes)
    spec["data"]["train"] = "few.jsonl"
    return spec


def steps_logged(run: RunDir) -> int:
    """Highest step in the metrics."""
    return max((row.step for row in run.metrics()), default=0)


class NoEngine(Exception):
    """Why there is no Docker engine here."""


@contextmanager
def docker_engine() -> Iterator[dict[str, str]]:
    """The environment in which `docker` works: as it is, or with an engine of our own until the end."""
    environment = dict(os.environ)
    if _answers(environment):
        yield environment
        return
    if not ENGINE.exists():
        raise NoEngine("no Docker engine answers (with Compose v2), and there is no script here to start one")
    if os.geteuid() != 0:
        raise NoEngine("no Docker engine answers (with Compose v2), and only root could start one")
    home = Path(tempfile.mkdtemp(prefix="longhaul-engine-"))  # not under pytest's: a socket's path has to be short
    try:
        subprocess.run([ENGINE, "up", home], check=True, timeout=600)
        lines = subprocess.run([ENGINE, "env", home], check=True, capture_output=True, text=True).stdout
        shown = subprocess.run(["bash", "-c", f"{lines}\nenv -0"], check=True, capture_output=True, text=True).stdout
        yield dict(pair.split("=", 1) for pair in shown.split("\0") if pair)
    finally:
        subprocess.run([ENGINE, "down", home], check=False, timeout=120)
        shutil.rmtree(home, ignore_errors=True)


def _answers(environment: Mapping[str, str]) -> bool:
    if shutil.which("docker") is None:
        return False
    asked = (["docker", "version"], ["docker", "compose", "version"])
    return all(subprocess.run(words, env=environment, capture_output=True).returncode == 0 for words in asked)


class Containers:
    """`docker compose` on a copy of what the images are built from: volumes, runs and .env are the test's own."""

    def __init__(self, home: Path, environment: Mapping[str, str]) -> None:
        self.home = home
        self.runs = home / "runs"
        self.project = f"longhaul-test-{os.getpid()}"
        # Nothing that is exported where the tests run may stand in for .env.
        ours = ("LONGHAUL_", "WANDB_", "DISCORD_", "COMPOSE_", "MAKE", "UID", "GID", "SUDO_")
        self.environment = {key: value for key, value in environment.items() if not key.startswith(ours)}
        for name in SENT:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, home / name)
        subprocess.run(["make", "env"], cwd=home, env=self.environment, check=True)
        self.settings = dict(
            line.split("=", 1) for line in (home / ".env").read_text().splitlines() if line and line[0] != "#"
        )
        port = free_port()
        self.set(LONGHAUL_DEVICE="cpu", LONGHAUL_PORT=str(port))
        self.url = f"http://127.0.0.1:{port}"
        self.http = requests.Session()
        self.http.headers["Authorization"] = f"Bearer {self.settings['LONGHAUL_API_KEY']}"

    def set(self, **settings: str) -> None:
        """Change .env."""
        self.settings |= settings
        (self.home / ".env").write_text("".join(f"{key}={value}\n" for key, value in self.settings.items()))

    def docker(self, *words: str, check: bool = True, timeout: float = 300) -> str:
        """What `docker …` prints."""
        done = subprocess.run(
            ["docker", *words], cwd=self.home, env=self.environment, capture_output=True, text=True, timeout=timeout
        )
        if check:
            assert done.returncode == 0, f"docker {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def compose(self, *words: str, check: bool = True, timeout: float = 900) -> str:
        """What `docker compose …` prints; .env says which files it reads."""
        return self.docker("compose", "-p", self.project, *words, check=check, timeout=timeout)

    def up(self, *services: str) -> None:
        """Start what does not run, and wait until it is healthy. `up --wait` would give up at the first container whose
        health check a busy machine makes late.
        """
        self.compose("up", "-d", *services)
        self.wait_for(lambda: self.healthy(*services) or None, "all containers to be healthy", 900, every=1)

    def healthy(self, *services: str) -> bool:
        """Whether these services, or all, have healthy containers."""
        said = self.compose("ps", "--format", "{{.Service}} {{.Health}}", *services).splitlines()
        return set(said) == {f"{service} healthy" for service in services or ("redis", *OURS)}

    def inside(self, service: str, *command: str, check: bool = True, timeout: float = 120) -> str:
        """What a command prints in the running container of a service."""
        return self.compose("exec", "-T", service, *command, check=check, timeout=timeout)

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows about the container of a service."""
        found = json.loads(self.docker("inspect", self.compose("ps", "-aq", service).strip()))
        assert len(found) == 1
        return dict(found[0])

    def image(self, service: str) -> str:
        """Name of the image that a service of ours runs."""
        return f"{self.project}-{'service' if service == 'service' else 'worker'}"

    def workers(self, stage: str) -> list[dict[str, Any]]:
        """What workers of a stage report of themselves, as /workers shows it."""
        listed = self.http.get(f"{self.url}/workers", timeout=10).json()["data"]
        return [facts for facts in listed if facts["stage"] == stage]

    def submit(self, spec: Mapping[str, Any]) -> RunDir:
        """POST a job from outside; it must be accepted."""
        answer = self.http.post(f"{self.url}/jobs", json=spec, timeout=10)
        assert answer.status_code == 202, answer.text
        return RunDir(self.runs / answer.json()["id"])

    def status(self, run: RunDir) -> str:
        """Status of a job, asked over HTTP."""
        return str(self.http.get(f"{self.url}/jobs/{run.id}", timeout=10).json()["status"])

    def wait_for_status(self, run: RunDir, wanted: str, timeout: float = 300) -> None:
        """Wait for a status; another terminal one is an error."""

        def look() -> bool | None:
            status = self.status(run)
            assert status == wanted or status not in ("failed", "cancelled", "succeeded"), (
                f"{run.id} is {status}\n{run.events_file.read_text()}\n{self.logs()}"
            )
            return True if status == wanted else None

        self.wait_for(look, f"{run.id} to be {wanted}", timeout)

    def wait_for(self, look: Callable[[], Found | None], what: str, timeout: float = 60, every: float = 0.2) -> Found:
        """Look until there is something; the logs are in the message when it does not come."""
        deadline = time.monotonic() + timeout
        while (found := look()) is None:
            assert time.monotonic() < deadline, f"waited {format_duration(timeout)} for {what}\n{self.logs()}"
            time.sleep(every)
        return found

    def logs(self) -> str:
        """The last lines of every container and trainer."""
        trainers = "".join(file.read_text()[-2000:] for file in self.runs.glob("*/trainer.log"))
        return self.compose("logs", "--tail", "15", check=False) + trainers
