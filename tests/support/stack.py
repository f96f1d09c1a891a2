"""The whole of Longhaul as real processes: Redis, service, one worker per stage, publish. For e2e and fault tests.

Every process dies with the test's own (jobs/process/lifeline.py) and is ended by pid only.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import requests

from jobs.disk.rundir import RunDir
from jobs.events import Event
from jobs.process.lifeline import WARM, tied_to_parent
from jobs.text.units import format_duration
from tests.support.redis_server import RedisServer, free_port
from worker.training.warm import read_at_import
from worker.warm import WarmProcess

ROOT = Path(__file__).parents[2]
ROLES = ("service", "check", "prepare", "train", "publish")
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")
NEVER_IDLE = Path(__file__).with_name("never_idle")
USUAL = {
    "HF_HUB_OFFLINE": "1",
    "LONGHAUL_TEST_SOON": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{NEVER_IDLE}",
    "PYTHONUNBUFFERED": "1",
}
Found = TypeVar("Found")


def usual_environment() -> dict[str, str]:
    """That of whatever a stack starts, but for its own settings."""
    return {name: os.environ[name] for name in KEPT if name in os.environ} | USUAL


@functools.cache
def warm_of_all_tests() -> WarmProcess:
    """Forks the trainers of every stack of this process: their imports take longer than their jobs."""
    process = WarmProcess(usual_environment())
    atexit.register(process.close)
    return process


SLOWEST = 5
"""A CPU without bf16 instructions, or one that others use, takes so many times as long as is waited for elsewhere."""


class Stack:
    """`with Stack(tmp_path, data=folder) as stack:`, then `stack.start("train")`, `stop("train")`, `kill("train")`.

    `root`: the repository whose code runs.
    """

    def __init__(
        self,
        home: Path,
        *,
        data: Path,
        environment: Mapping[str, str] = {},
        aof: bool = True,
        rules: str | None = None,
        box_rules: str | None = None,
        root: Path = ROOT,
        own_warm: bool = False,
    ) -> None:
        """`own_warm`: trainers are forked by processes of its own, not by that of all tests."""
        self.home = home
        self.root = root
        self.runs = home / "runs"
        self.redis = RedisServer(home / "redis", aof=aof, rules=rules, box_rules=box_rules)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = usual_environment() | {
            "LONGHAUL_REDIS_URL": self.redis.url,
            "LONGHAUL_PORT": str(self.port),
            "LONGHAUL_DEVICE": "cpu",
            "LONGHAUL_DATA": str(data),
            "LONGHAUL_RUNS": str(self.runs),
            "LONGHAUL_UPLOADS": str(home / "uploads"),
            "LONGHAUL_PREPARED": str(home / "prepared"),
            "LONGHAUL_MODELS": str(home / "models"),
            "LONGHAUL_TRACES": os.environ["LONGHAUL_TRACES"],
            **environment,
        }
        self._own_warm = own_warm or root != ROOT or bool(read_at_import(environment))

    def start(self, *roles: str) -> None:
        """Start processes (of one role several: "train-2"); wait for the service to answer."""
        if not self._own_warm:
            self.environment.setdefault(WARM, warm_of_all_tests().socket)
        for role in roles:
            module = ["-m", "service"] if role == "service" else ["-m", "worker", role.partition("-")[0]]
            with open(self.home / f"{role}.log", "ab") as log:
                command, environment = self.command(role, sys.executable, *module), self.environment_of(role)
                self.processes[role] = subprocess.Popen(command, cwd=self.root, env=environment, stdout=log, stderr=log)
        if "service" in roles:
            self.wait_for(lambda: self._ready() or None, "the service", 90)

    def command(self, role: str, *words: str) -> list[str]:
        """What starts a role whose program is this."""
        return tied_to_parent(*words)

    def environment_of(self, role: str) -> Mapping[str, str]:
        """In which it runs."""
        return self.environment

    def start_if_gone(self, *roles: str) -> None:
        """Start those of these that do not run."""
        self.start(*(role for role in roles if role not in self.processes or self.processes[role].poll() is not None))

    def _ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/health/ready", timeout=2).status_code == 200
        except (requests.ConnectionError, requests.Timeout):  # a machine with other work may take its time
            return False

    def stop(self, role: str, signum: int = signal.SIGTERM, timeout: float = 120) -> int:
        """Send a signal and wait for the end."""
        process = self.processes.pop(role)
        process.send_signal(signum)
        return process.wait(timeout)

    def kill(self, role: str) -> None:
        """kill -9."""
        self.stop(role, signal.SIGKILL)

    def submit(self, spec: Mapping[str, Any], **headers: str) -> RunDir:
        """POST a job; it must be accepted."""
        answer = requests.post(f"{self.url}/jobs", json=spec, headers=headers, timeout=60)
        assert answer.status_code == 202, answer.text
        return RunDir(self.runs / answer.json()["id"])

    def post(self, run: RunDir, verb: str) -> requests.Response:
        """`POST /jobs/{id}/{verb}`."""
        return requests.post(f"{self.url}/jobs/{run.id}/{verb}", timeout=60)

    def wait_for(self, look: Callable[[], Found | None], what: str, timeout: float = 120) -> Found:
        """Look until there is something; the logs are in the message when it does not come."""
        deadline = time.monotonic() + SLOWEST * timeout
        while (found := look()) is None:
            assert time.monotonic() < deadline, f"waited {format_duration(timeout)} for {what}\n{self.logs()}"
            for role, process in self.processes.items():
                assert process.poll() is None, (
                    f"{role} ended ({process.returncode}) while waiting for {what}\n{self.logs()}"
                )
            time.sleep(0.05)
        return found

    def wait_for_event(self, run: RunDir, *types: str, timeout: float = 180, after: int = 0) -> Event:
        """The first event of one of these types."""

        def look() -> Event | None:
            return next((event for event in run.events(after=after) if event.type in types), None)

        return self.wait_for(look, f"{' or '.join(types)} of {run.id}", timeout)

    def shown(self, run: RunDir) -> dict[str, Any]:
        """`GET /jobs/{id}`, once Redis knows what is on disk now: the projection is made after the append."""
        number = run.record().number

        def up_to_date() -> dict[str, Any] | None:
            job: dict[str, Any] = requests.get(f"{self.url}/jobs/{run.id}", timeout=60).json()
            return job if job["event_number"] >= number else None

        return self.wait_for(up_to_date, f"the projection of event {number} of {run.id}")

    def logs(self) -> str:
        """The last lines of every log."""
        files = [*self.home.glob("*.log"), *self.runs.glob("*/trainer.log"), *self.runs.glob("*/events.jsonl")]
        ends = {file: [line[:300] for line in file.read_text().splitlines()[-12:]] for file in files}
        return "\n".join("\n".join([f"== {file.parent.name}/{file.name}", *lines]) for file, lines in ends.items())

    def __enter__(self) -> Stack:
        self.home.mkdir(parents=True, exist_ok=True)
        self.redis.start()
        self.redis.mark_rebuilt()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.redis.stop()


def tiny_job(**more: Any) -> dict[str, Any]:
    """16 steps of 8 rows: two epochs of 64; of each evaluation two texts of a few tokens."""
    return {
        "name": "tiny",
        "model": "builtin:t5-tiny",
        "data": {
            "train": "rows.jsonl",
            "validation": "held_out.jsonl",
            "max_input_tokens": 48,
            "max_target_tokens": 32,
        },
        "training": {"epochs": 2, "batch_size": 8, "learning_rate": 0.003},
        "memory": {"micro_batch": 4, "empty_cache_steps": 5},
        "log": {"every_steps": 2},
        "checkpoint": {"every_steps": 8, "keep": 2},
        "evaluation": {"every_steps": 8, "samples": 2, "generate_rows": 2, "sample_tokens": 4},
        **more,
    }
