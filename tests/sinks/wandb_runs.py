"""Runs of W&B: their child processes, and what is in their files."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs.disk.rundir import RunDir
from jobs.process.lifeline import tied_to_parent
from tests.sinks import story
from tests.support.fakes import WANDB_KEY, FakeWandb
from tests.support.processes import children
from tests.support.stack import ROOT

LEET = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]


PUBLISH = """
import sys, threading
from pathlib import Path
from jobs.process.lifeline import tied_to_parent
from worker.publish import SinkThread, publish
from worker.sinks.wandb.sink import WandbSink
stop = threading.Event()
command = tied_to_parent(sys.executable, "-m", "worker.sinks.wandb.child_process")
sink = WandbSink(lambda: command, *sys.argv[2:], flush_s=0.2)
publish(Path(sys.argv[1]), [SinkThread(sink)], lambda _: stop.wait(0.02), stop)
"""


def publish_in_a_process(runs: Path, *server: str) -> subprocess.Popen[bytes]:
    """With a sink for W&B: offline, or with this key and URL."""
    return subprocess.Popen([sys.executable, "-c", PUBLISH, str(runs), *server], cwd=ROOT)


def child() -> list[str]:
    return tied_to_parent(sys.executable, "-m", "worker.sinks.wandb.child_process")


def sync(server: FakeWandb, *folders: Path) -> None:
    """What a person types, as the warning says."""
    command = [str(Path(sys.executable).with_name("wandb")), "sync", "--include-online", *map(str, folders)]
    environment = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": WANDB_KEY}
    environment["WANDB_DIR"] = str(folders[0].parents[1])  # where it logs
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)


def offline_files(run: RunDir) -> list[Path]:
    """In the order in which they were begun, which the names of their folders say: W&B may write to one for longer."""
    found = (run.path / "wandb").glob("*run-*/*.wandb")
    return sorted(found, key=lambda file: (file.parent.name.partition("run-")[2], file.stat().st_mtime))


@functools.cache
def records(file: Path) -> list[dict[str, Any]]:
    done = subprocess.run([*LEET, str(file)], capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(file: Path, key: str) -> list[tuple[int, Any]]:
    """(train/step, value) of the rows that have this key."""
    rows = [record["history"] for record in records(file) if record["type"] == "history"]
    rows = [row.get("item", row) for row in rows]
    return [(int(row["train/step"]), row[key]) for row in rows if key in row]


def expected(first: int, last: int) -> list[tuple[int, float]]:
    return [(step, story.row(step).loss) for step in range(first, last + 1, 10)]


def wandb_children(parent: int | None = None) -> list[int]:
    """Process ids of the W&B children of a process, of this one unless said."""
    found = []
    for pid in children(os.getpid() if parent is None else parent):
        with contextlib.suppress(FileNotFoundError):
            if b"worker.sinks.wandb.child_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found
