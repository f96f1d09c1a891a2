"""`sky jobs launch`, `queue`, `logs` and `cancel`, as Longhaul uses them. A managed job that lost its machine is
RECOVERING until it is cancelled, or starts again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import yaml

from tests.fake_cloud.machine import Cloud

STATES = {"pending": "STARTING", "running": "RUNNING", "lost": "RECOVERING", "cancelled": "CANCELLED"}


def leave(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(1)


def main(cloud: Cloud, argv: list[str]) -> None:
    cloud.log(f"sky {' '.join(argv[:2])}")
    if cloud.told("down"):
        leave("Could not connect to SkyPilot API server.")
    parser = argparse.ArgumentParser(prog="sky jobs", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    launch, queue, logs, cancel = (commands.add_parser(each) for each in ("launch", "queue", "logs", "cancel"))
    for command in (launch, cancel):
        command.add_argument("--yes", action="store_true", required=True)  # it would ask
    for command in (launch, logs, cancel):
        command.add_argument("--name", required=True)
    launch.add_argument("--detach-run", action="store_true", required=True)  # it would follow the log
    launch.add_argument("file", type=Path)
    queue.add_argument("--all", action="store_true", required=True)  # it would show ten
    queue.add_argument("--verbose", action="store_true")
    queue.add_argument("--output", choices=["json"], required=True)
    logs.add_argument("--no-follow", action="store_true", required=True)
    logs.add_argument("--tail")
    assert argv[0] == "jobs", argv
    given = parser.parse_args(argv[1:])
    if given.command == "launch":
        if cloud.told("refuse"):
            leave((cloud.folder / "refuse").read_text())
        task = yaml.safe_load(given.file.read_text())
        (cloud.folder / f"{given.name}.yaml").write_text(given.file.read_text())
        script = f"{task.get('setup') or ''}\n{task['run']}"
        cloud.launch(given.name, ["bash", "-c", script], task["envs"], os.environ.get("FAKE_CLOUD_DISK"))
        print(f"Job submitted, ID: {len(cloud.tasks())}")
    elif given.command == "queue":
        print("\x1b[33m[warning] words that stand before the answer\x1b[0m")
        print(json.dumps([
            {"job_id": number, "job_name": each["name"], "failure_reason": None, "details": None,
             "status": STATES.get(each["state"]) or ("SUCCEEDED" if each["code"] == 0 else "FAILED")}
            for number, each in enumerate(cloud.tasks(), 1)
        ], indent=2))  # fmt: skip
    elif given.command == "logs":
        print((cloud.folder / f"{given.name}.out").read_text())
        raise SystemExit(100)  # as of a job that failed
    elif (job := cloud.task(given.name)) is not None and job["state"] in ("pending", "running", "lost"):
        (cloud.folder / f"{given.name}.do").write_text("cancel")


if __name__ == "__main__":
    main(Cloud(Path(os.environ["FAKE_CLOUD"])), sys.argv[1:])
