"""Checkpoints of a job: OpenAI's shape, made of what is on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from jobs import answers
from jobs.disk.files import append_line
from jobs.redis.connection import connect
from jobs.redis.requests import Requests
from tests.service.running import Service
from tests.support.samples import heartbeat, metric_row


def saved(run: Path, step: int, loss: float | None, *, size: int = 1000) -> Path:
    """A checkpoint as the trainer leaves it, but for what is in the tensors."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(size))
    (folder / "state.json").write_text(json.dumps({"step": step, "validation_loss": loss}))
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {}}))
    return folder


def test_checkpoints_are_those_on_disk_newest_first(service: Service) -> None:
    job = service.submit()
    run = service.run(job)
    assert service.get(f"/jobs/{job}/checkpoints").json() == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None,
    }  # fmt: skip
    folders = {
        step: saved(run.path, step, loss) for step, loss in ((500, 2.5), (1000, 1.5), (1500, None), (2000, 1.75))
    }
    # Step 1000 was logged twice: an attempt resumed from 500.
    for step, loss in ((990, 3.0), (1000, 2.9), (990, 2.8), (1000, 2.7), (1500, 2.0)):
        append_line(run.metrics_file, metric_row(step, loss=loss))

    page = TypeAdapter(answers.CheckpointList).validate_python(service.get(f"/jobs/{job}/checkpoints").json())
    assert [each["step_number"] for each in page["data"]] == [2000, 1500, 1000, 500]
    assert [each["best"] for each in page["data"]] == [False, False, True, False]
    assert [each["metrics"].get("valid_loss") for each in page["data"]] == [1.75, None, 1.5, 2.5]
    assert [each["metrics"].get("train_loss") for each in page["data"]] == [2.0, 2.0, 2.7, None]
    assert [each["metrics"]["step"] for each in page["data"]] == [2000, 1500, 1000, 500]
    newest = page["data"][0]
    assert newest["id"] == f"{job}/step-00002000"
    assert newest["fine_tuning_job_id"] == job
    assert newest["fine_tuned_model_checkpoint"] == f"runs/{job}/checkpoints/step-00002000"
    assert newest["path"] == "checkpoints/step-00002000"
    assert newest["bytes"] == sum(file.stat().st_size for file in folders[2000].iterdir())
    assert newest["created_at"] == int((folders[2000] / "manifest.json").stat().st_mtime)
    assert service.get(f"/jobs/{job}/files/{newest['path']}").status_code == 200
    assert "valid_loss" not in service.get(f"/jobs/{job}/checkpoints").json()["data"][1]["metrics"]


def test_pages_follow_one_another(service: Service) -> None:
    job = service.submit()
    for step in range(1, 6):
        saved(service.run(job).path, step, None)
    seen: list[int] = []
    after = ""
    while True:
        raw = service.get(f"/jobs/{job}/checkpoints?limit=2{after}").json()
        page = TypeAdapter(answers.CheckpointList).validate_python(raw)
        seen += [each["step_number"] for each in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert seen == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("missing", ["manifest.json", "state.json"])
def test_what_is_not_complete_is_none(service: Service, missing: str) -> None:
    job = service.submit()
    run = service.run(job).path
    saved(run, 1, 1.0)
    (saved(run, 2, 0.5) / missing).unlink()
    for name in ("tmp-step-00000003", "rejected-step-00000004", "step-x", "tmp-removed-step-00000005"):
        saved(run, 9, 0.1).rename(run / "checkpoints" / name)
    (run / "checkpoints" / "step-00000006").write_bytes(b"a file")
    (saved(run, 7, 0.1) / "state.json").write_bytes(b"torn {")
    data = service.get(f"/jobs/{job}/checkpoints").json()["data"]
    assert [(each["step_number"], each["best"]) for each in data] == [(1, True)]


def test_of_equals_the_earliest_is_best_as_for_pruning(service: Service) -> None:
    job = service.submit()
    for step in (1, 2, 3):
        saved(service.run(job).path, step, 1.0)
    data = service.get(f"/jobs/{job}/checkpoints").json()["data"]
    assert [each["best"] for each in data] == [False, False, True]


@pytest.mark.parametrize(
    ("given", "name"),
    [("500", "step-00000500"), ("step-500", "step-00000500"), ("best", "step-00001000"), ("last", "step-00001500")],
)
def test_a_model_is_asked_for_by_step_best_or_last(service: Service, given: str, name: str) -> None:
    job = service.submit()
    for step, loss in ((500, 2.5), (1000, 1.5), (1500, None)):
        saved(service.run(job).path, step, loss)
    service.store.workers.report(heartbeat("generate-box"))
    with service.post(f"/jobs/{job}/generate", json={"input": "x", "checkpoint": given, "stream": True}, stream=True):
        request = Requests(connect(service.settings.redis_url)).take("generate")
    assert request is not None and request.payload["checkpoint"] == name


@pytest.mark.parametrize("given", ["step-", "newest", "500\n", "../500"])
def test_a_name_that_no_checkpoint_has_is_answered_in_words(service: Service, given: str) -> None:
    answer = service.post(f"/jobs/{service.submit()}/generate", json={"input": "x", "checkpoint": given})
    assert answer.status_code == 422 and "such as step-00000500 or 500, or is best or last" in answer.text
    assert "[0-9]" not in answer.text


def test_the_best_of_none_is_answered_in_words(service: Service) -> None:
    service.store.workers.report(heartbeat("generate-box"))
    answer = service.post(f"/jobs/{service.submit()}/generate", json={"input": "x", "checkpoint": "best"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_checkpoint")
