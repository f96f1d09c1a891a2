"""What is said where a job has no model: only what works is advised."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobFailed,
    JobPaused,
    JobQueued,
    JobSucceeded,
    JobValidated,
    ModelRemoved,
)
from jobs.trainer_facts import CheckpointSaved, Fault
from tests.service.running import Service
from tests.service.seeded import start_trial
from tests.support.samples import checked, prepared

STARTED = (checked(), prepared(4), JobQueued(), AttemptStarted(worker="w", device="cpu"))


SAVED = CheckpointSaved(step=10, path="checkpoints/step-00000010", bytes=600, seconds=0.1)
INTERRUPTED = (AttemptEnded(reason="interrupted", step=10), JobPaused())
CRASHED = (AttemptEnded(reason="crash", step=10), JobFailed(error=Fault(code="crash", message="m")))


@pytest.mark.parametrize(
    ("facts", "hint", "or_checkpoint"),
    [
        ((), "wait for its end", False),
        ((*STARTED, SAVED), "wait for its end", True),
        ((*STARTED, *INTERRUPTED), "resume it: `longhaul resume {job}`", False),
        ((*STARTED, SAVED, *INTERRUPTED), "resume it: `longhaul resume {job}`", True),
        ((*STARTED, *CRASHED), "`longhaul show {job}` says why", False),
        ((*STARTED, SAVED, *CRASHED), "`longhaul show {job}` says why", True),
    ],
)
def test_a_checkpoint_is_advised_where_there_is_one_and_it_can_be_named(
    service: Service, facts: Sequence[AnyFact], hint: str, or_checkpoint: bool
) -> None:
    job = service.submit()
    service.append(job, *facts)
    answers = {
        path: service.post(f"/jobs/{job}/{path}", json=body)
        for path, body in (("generate", {"input": "leeks"}), ("exports", {"format": "gguf"}))
    }
    told = {path: answer.json()["error"] for path, answer in answers.items()}
    assert {each["code"] for each in told.values()} == {"no_model"}
    assert told["exports"]["hint"] == hint.format(job=job)
    checkpoint = f"name a checkpoint: `longhaul checkpoints {job}` lists those that it has"
    ended = any(isinstance(each, JobFailed) for each in facts)
    with_one = checkpoint if ended else f"{hint.format(job=job)}, or {checkpoint}"
    assert told["generate"]["hint"] == (with_one if or_checkpoint else hint.format(job=job))


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
