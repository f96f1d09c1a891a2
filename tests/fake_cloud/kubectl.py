"""`kubectl create`, `get`, `logs` and `delete`, as Longhaul uses them, and what Kubeflow Trainer makes of TrainJobs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from tests.fake_cloud.machine import Cloud


def leave(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(1)


def create(cloud: Cloud) -> None:
    document = json.load(sys.stdin)
    assert document["kind"] == "TrainJob", document
    name, trainer = document["metadata"]["name"], document["spec"]["trainer"]
    if cloud.told("refuse"):
        leave(f"Error from server (Forbidden): {(cloud.folder / 'refuse').read_text()}")
    if cloud.task(name) is not None:
        leave(f'Error from server (AlreadyExists): trainjobs "{name}" already exists')
    (cloud.folder / f"{name}.manifest").write_text(json.dumps(document))
    environment = {each["name"]: each["value"] for each in trainer["env"]}
    cloud.launch(name, trainer["command"], environment, os.environ.get("FAKE_CLOUD_DISK"))
    print(f"trainjob.trainer.kubeflow.org/{name} created")


def train_job(task: dict[str, Any], deleted: bool) -> dict[str, Any]:
    """As the server has it."""
    running, over = task["state"] == "running", task["state"] in ("ended", "lost", "cancelled")
    conditions = []
    if over:
        ok = task["state"] == "ended" and task["code"] == 0
        about = "jobset completed successfully" if ok else "jobset failed due to one or more job failures"
        conditions = [
            {"type": "Complete" if ok else "Failed", "status": "True", "reason": "JobsCompleted", "message": about}
        ]
    jobs = [
        {"name": "node", "ready": int(running), "active": int(not over), "failed": 0, "succeeded": 0, "suspended": 0}
    ]
    deletion = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob",
        "metadata": {"name": task["name"], "uid": "0", **deletion}, "spec": {},
        "status": {"conditions": conditions, "jobsStatus": jobs},
    }  # fmt: skip


def pods(cloud: Cloud, name: str) -> dict[str, Any]:
    task = cloud.task(name)
    if task is None:
        return {"items": []}
    lost = [{"type": "DisruptionTarget", "status": "True"}] if task["state"] == "lost" else []
    end = {"terminated": {"exitCode": task["code"], "reason": "Error"}}
    return {
        "items": [
            {"status": {"phase": "Failed", "conditions": lost, "containerStatuses": [{"name": "node", "state": end}]}}
        ]
    }


def main(cloud: Cloud, argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="kubectl", allow_abbrev=False)
    parser.add_argument("--context")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--request-timeout", required=True)
    commands = parser.add_subparsers(dest="command", required=True)
    make, get, logs, delete = (commands.add_parser(each) for each in ("create", "get", "logs", "delete"))
    make.add_argument("--filename", choices=["-"], required=True)
    get.add_argument("kind", choices=["trainjob", "pods"])
    get.add_argument("name", nargs="?")
    get.add_argument("--output", choices=["json"], required=True)
    for command in (get, logs):
        command.add_argument("--selector", default="")
    logs.add_argument("--tail")
    delete.add_argument("kind", choices=["trainjob"])
    delete.add_argument("name")
    delete.add_argument("--cascade", choices=["foreground"], required=True)
    delete.add_argument("--wait", choices=["false"], required=True)
    for command in (get, delete):
        command.add_argument("--ignore-not-found", action="store_true")
    given = parser.parse_args(argv)
    cloud.log(f"kubectl {given.command}")
    if cloud.told("down"):
        leave("Unable to connect to the server: dial tcp 10.0.0.1:443: i/o timeout")
    if given.command == "create":
        create(cloud)
        return
    name = given.name or given.selector.partition("=")[2] if given.command != "delete" else given.name
    task, file = cloud.task(name), cloud.folder / f"{name}.do"
    if given.command == "logs":
        print((cloud.folder / f"{name}.out").read_text())
    elif given.command == "delete":
        if task is not None:
            file.write_text("cancel")
    elif given.kind == "pods":
        print(json.dumps(pods(cloud, name)))
    elif task is not None:
        deleted = file.exists() and file.read_text() == "cancel"
        if deleted and task["state"] in ("ended", "lost", "cancelled"):
            return  # it is gone with its pods
        print(json.dumps(train_job(task, deleted)))


if __name__ == "__main__":
    main(Cloud(Path(os.environ["FAKE_CLOUD"])), sys.argv[1:])
