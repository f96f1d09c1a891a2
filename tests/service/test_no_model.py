"""What is said where a job has no model: only what works is advised."""

from __future__ import annotations

import pytest

from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    Fault,
    JobFailed,
    JobQueued,
    JobSucceeded,
    JobValidated,
    ModelRemoved,
)
from tests.service.running import Service
from tests.service.seeded import start_trial
from tests.support.samples import checked, prepared

STARTED = (checked(), prepared(4), JobQueued(), AttemptStarted(worker="w", device="cpu"))


def asked(service: Service, job: str) -> tuple[str, str]:
    answer = service.post(f"/jobs/{job}/generate", json={"input": "leeks"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_model")
    return answer.json()["error"]["message"], answer.json()["error"]["hint"]


def test_a_job_at_work_will_have_one(service: Service) -> None:
    job = service.submit()
    assert asked(service, job) == (
        f"job {job} has no model yet",
        f"wait for its end, or name a checkpoint: `longhaul checkpoints {job}` lists those that it has",
    )


def test_a_job_that_failed_may_have_checkpoints(service: Service) -> None:
    job = service.submit()
    saved = CheckpointSaved(step=10, path="checkpoints/step-00000010", bytes=600, seconds=0.1)
    ended = AttemptEnded(reason="crash", step=10), JobFailed(error=Fault(code="crash", message="m"))
    service.append(job, *STARTED, saved, *ended)
    assert asked(service, job)[1] == f"name a checkpoint: `longhaul checkpoints {job}` lists those that it has"
    other = service.submit()
    service.append(other, *STARTED, *ended)
    assert asked(service, other)[1] == f"`longhaul show {other}` says why"


@pytest.mark.parametrize("path", ["generate", "exports"])
def test_a_dry_run_and_an_evaluation_make_none(service: Service, path: str) -> None:
    dry_run = service.post("/jobs?dry_run=true", json={"data": {"train": "rows.jsonl"}}).json()["id"]
    service.append(dry_run, checked(), JobValidated())
    evaluation = service.submit(kind="evaluate")
    service.append(
        evaluation, *STARTED, AttemptEnded(reason="done", step=0), JobSucceeded(model=None, step=0, loss=1.0)
    )
    body = {"input": "leeks"} if path == "generate" else {"format": "gguf"}
    told = [service.post(f"/jobs/{job}/{path}", json=body).json()["error"] for job in (dry_run, evaluation)]
    assert [each["message"] + "; " + each["hint"] for each in told] == [
        f"job {dry_run} is a dry run, which trains nothing; `longhaul clone {dry_run}` submits it for training",
        f"job {evaluation} evaluates a model, and makes none; name a job that has trained one: "
        "`longhaul list --status succeeded` shows them",
    ]
    again = service.post(f"/jobs/{dry_run}/clone", json={})
    assert again.status_code == 202 and not again.json()["dry_run"], "the advice works"
    for job in (dry_run, evaluation):
        page = service.get(f"/jobs/{job}?tab=try", headers={"Accept": "text/html"}).text
        assert "No model yet" not in page and "<h2>No model</h2>" in page


def test_what_a_sweep_removed_is_no_model_anywhere(service: Service) -> None:
    body = {"job": {"data": {"train": "rows.jsonl"}}, "space": {"training.batch_size": [16, 32]}}
    sweep = service.post("/sweeps", json=body).json()["id"]
    kept, removed = start_trial(service, sweep, 0), start_trial(service, sweep, 1)
    for job in (kept, removed):
        service.append(
            job, *STARTED, AttemptEnded(reason="done", step=4), JobSucceeded(model="model", step=4, loss=1.0)
        )
    service.run(kept).model.mkdir()
    service.append(removed, ModelRemoved())
    push = {"repository": "cooks/tuned", "license": "mit"}
    for path, asked_for in (("generate", {"input": "x"}), ("exports", {"format": "merged"}), ("push", push)):
        answer = service.post(f"/jobs/{removed}/{path}", json=asked_for)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_model"), path
        assert f"is a trial of sweep {sweep}, which keeps the model of its best" in answer.json()["error"]["message"]
    assert [each["id"] for each in service.get("/v1/models").json()["data"]] == [f"ft:{kept}"]
    assert service.get(f"/v1/models/ft:{removed}").status_code == 404
    assert service.get(f"/jobs/{removed}").json()["fine_tuned_model"] is None
    pages = {
        tab: service.get(f"/jobs/{removed}?tab={tab}", headers={"Accept": "text/html"}).text for tab in ("try", "files")
    }
    assert f"Job {removed} is a trial of sweep {sweep}" in pages["try"] and "<h2>Exports</h2>" not in pages["files"]
