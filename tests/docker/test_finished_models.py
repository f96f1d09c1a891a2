"""Models tried, exported and evaluated in containers, and a sweep; all of it is there after `down` and `up`."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from jobs.disk.rundir import RunDir
from jobs.events import AttemptEnded
from longhaul import Longhaul
from tests.docker.engine import ROOT, Containers, few, steps_logged
from tests.support.samples import facts_of

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]
CHAT: dict[str, Any] = {
    "model": "builtin:qwen-tiny",
    "method": {"type": "lora", "merge": False},
    "data": {"train": "chats.jsonl", "validation": 0.1},
    "training": {"max_steps": 4, "batch_size": 16},
    "evaluation": {"samples": 1, "generate_rows": 4},
}
SWEEP: dict[str, Any] = {
    "job": {
        "model": "builtin:roberta-tiny",
        "data": {"train": "tickets.jsonl", "validation": 0.2, "max_input_tokens": 64},
        "training": {"epochs": 8, "batch_size": 16},
        "checkpoint": {"every_steps": 10},
        "evaluation": {"every_steps": 1000, "samples": 0},
    },
    "space": {"training.learning_rate": [1e-4, 1e-3]},
    "sampler": "grid",
    "metric": "accuracy",
}
GENERATES = "worker.training generate"


@pytest.fixture
def api(containers: Containers) -> Longhaul:
    """With the key of .env, and the examples as data."""
    for name in ("chats.jsonl", "tickets.jsonl"):
        shutil.copy(ROOT / "examples" / name, containers.home / "data")
    return Longhaul(containers.url, containers.settings["LONGHAUL_API_KEY"])


def processes(containers: Containers, service: str) -> str:
    """Command lines in the container of a service."""
    return containers.inside(service, "sh", "-c", "cat /proc/[0-9]*/cmdline", check=False).replace("\0", " ")


def exported(containers: Containers, api: Longhaul, run: RunDir, format: str) -> dict[str, Any]:
    """The report of an export, which must be complete."""
    api.export(run.id, format)

    def look() -> bool | None:
        [found] = [each for each in api.exports(run.id) if each["format"] == format]
        assert found["status"] != "failed", f"{found}\n{containers.logs()}"
        return True if found["status"] == "done" else None

    containers.wait_for(look, f"the export to {format}", 600)
    folder = run.path / "exports" / format
    owner = (int(containers.settings["UID"]), int(containers.settings["GID"]))
    assert {(path.stat().st_uid, path.stat().st_gid) for path in [folder, *folder.iterdir()]} == {owner}
    return dict(json.loads((folder / "export.json").read_text()))


def test_a_model_is_tried_exported_and_measured_by_containers_that_may(containers: Containers, api: Longhaul) -> None:
    run, chat = containers.submit(few()), containers.submit(CHAT)
    for each in (run, chat):
        containers.wait_for_status(each, "succeeded")
    answer = api.generate(run.id, {"input": "Bread", "base": True, "max_new_tokens": 4})
    assert [output["model"] for output in answer["outputs"]] == ["trained", "base"]
    assert answer["device"] == "cpu"
    assert GENERATES in processes(containers, "generate") and GENERATES not in processes(containers, "worker")
    for job, format in ((run, "ctranslate2"), (chat, "gguf"), (chat, "merged")):
        report = exported(containers, api, job, format)
        assert report["verification"]["difference"] <= report["verification"]["limit"]
    measured = containers.submit({"kind": "evaluate", "model": run.id, "data": {"train": "few.jsonl"}})
    containers.wait_for_status(measured, "succeeded")


def test_a_sweep_goes_on_after_down_and_up_and_everything_is_there(containers: Containers, api: Longhaul) -> None:
    finished = containers.submit(few())
    containers.wait_for_status(finished, "succeeded")
    exported(containers, api, finished, "ctranslate2")
    sweep = api.submit_sweep(SWEEP)["id"]

    def first_trial() -> RunDir | None:
        jobs = [job for trial in api.sweep_trials(sweep) for job in trial["jobs"]]
        runs = [run for job in jobs if steps_logged(run := RunDir(containers.runs / job)) >= 10]
        return runs[0] if runs else None

    interrupted = containers.wait_for(first_trial, "ten steps of a trial", 300)
    containers.compose("down")
    assert [end.reason for end in facts_of(interrupted, AttemptEnded)] == ["interrupted"]
    containers.up()
    assert [each["format"] for each in api.exports(finished.id) if each["status"] == "done"] == ["ctranslate2"]
    assert api.generate(finished.id, {"input": "Bread", "max_new_tokens": 4})["outputs"]
    found = containers.wait_for(
        lambda: each if (each := api.sweep(sweep))["status"] != "running" else None, "the end of the sweep", 600
    )
    assert (found["status"], found["trials"]) == ("succeeded", {"succeeded": 2}), containers.logs()
    assert [end.reason for end in facts_of(interrupted, AttemptEnded)] == ["interrupted", "done"]
