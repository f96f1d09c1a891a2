"""The machine of one task: `python -m tests.fake_cloud.machine FOLDER NAME`. It imports nothing but Python's own.

`FOLDER/NAME.json` is the task: what it runs, and how it is. What tests tell the cloud are files: `hold` (tasks wait),
`again` (a task that was taken away starts again by itself), and `NAME.do` with `preempt`, `lose` or `cancel`. `log` has
a line for each start and end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

GRACE_S = 300.0
"""Between SIGTERM and SIGKILL."""
TICK_S = 0.05


class Cloud:
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def told(self, what: str) -> bool:
        return (self.folder / what).exists()

    def task(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def save(self, task: dict[str, Any]) -> None:
        temporary = self.folder / f".{task['name']}.{os.getpid()}"
        temporary.write_text(json.dumps(task))
        os.replace(temporary, self.folder / f"{task['name']}.json")

    def tasks(self) -> list[dict[str, Any]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]

    def log(self, line: str) -> None:
        with open(self.folder / "log", "a") as file:
            file.write(f"{line}\n")

    def launch(self, name: str, command: list[str], environment: dict[str, str], disk: str | None) -> None:
        """A task with a machine of its own. `disk`: a folder that is empty at each start."""
        self.save({
            "name": name, "command": command, "environment": environment, "disk": disk, "state": "pending", "code": 0,
            "starts": 0, "pids": [],
        })  # fmt: skip
        with open(self.folder / f"{name}.out", "ab") as output:
            python = os.environ.get("FAKE_CLOUD_PYTHON", sys.executable)
            subprocess.Popen(
                [python, "-m", "tests.fake_cloud.machine", self.folder, name],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip


class Running(Protocol):
    """A program of a task."""

    # fmt: off
    def poll(self) -> int | None: ...
    def signal(self, number: int) -> None: ...
    # fmt: on


class LocalProgram:
    """As a process of this machine."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


def run(cloud: Cloud, task: dict[str, Any], start: Any = LocalProgram) -> dict[str, Any]:
    """One start, to its end. Returns the task as it is then."""
    if task["disk"] is not None:
        shutil.rmtree(task["disk"], ignore_errors=True)
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    program = start(task["command"], kept | task["environment"])
    task |= {"state": "running", "starts": task["starts"] + 1, "pids": [os.getpid(), program.pid]}
    cloud.save(task)
    cloud.log(f"start {task['name']}")
    order, kill_at = None, 0.0
    while (code := program.poll()) is None:
        if order is None and cloud.told(f"{task['name']}.do"):
            order = (cloud.folder / f"{task['name']}.do").read_text()
            kill_at = 0.0 if order == "lose" else time.monotonic() + GRACE_S
            if kill_at:
                program.signal(signal.SIGTERM)
        if order is not None and time.monotonic() >= kill_at:
            program.signal(signal.SIGKILL)
        time.sleep(TICK_S)
    cloud.log(f"end {task['name']}")
    return task | {"state": {"cancel": "cancelled", None: "ended"}.get(order, "lost"), "code": code}


def main(folder: str, name: str) -> None:
    cloud = Cloud(Path(folder))
    task = cloud.task(name)
    assert task is not None
    task["pids"] = [os.getpid()]
    cloud.save(task)
    order = cloud.folder / f"{name}.do"
    while cloud.told("hold"):
        if cloud.told(order.name):
            cloud.save(task | {"state": "cancelled"})
            return
        time.sleep(TICK_S)
    task = run(cloud, task)
    while task["state"] == "lost":
        cloud.save(task)
        if order.read_text() == "cancel":
            task["state"] = "cancelled"
        elif cloud.told("again"):
            order.unlink()
            task = run(cloud, task)
        time.sleep(TICK_S)
    cloud.save(task)


if __name__ == "__main__":
    main(*sys.argv[1:])
