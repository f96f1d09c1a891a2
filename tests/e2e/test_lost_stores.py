"""The model and the data store are removed under a job that has a checkpoint, as `docker compose down -v` does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import requests

from jobs.events import JobPaused
from jobs.state import Status
from jobs.trainer_facts import ModelLoaded
from tests.support.processes import stepping, stopped_at
from tests.support.samples import facts_of, reasons
from tests.support.shared_stack import data_of, succeeds
from tests.support.stack import ROOT, Stack, tiny_job

ROWS = "stored.jsonl"


def upload(stack: Stack, rows: bytes) -> None:
    answer = requests.put(f"{stack.url}/datasets/{ROWS}", data=rows, timeout=60)
    assert answer.status_code in (200, 201), answer.text


def lose(stack: Stack) -> None:
    """The model and what was prepared."""
    for store in ("models", "prepared"):
        shutil.rmtree(stack.home / store, ignore_errors=True)


def test_what_was_prepared_is_made_again_or_the_job_pauses_and_names_what_is_missing(
    stack: Stack, tmp_path: Path
) -> None:
    rows = (data_of(stack) / "rows.jsonl").read_bytes()
    upload(stack, rows)
    spec = tiny_job()
    spec["data"] |= {"train": f"dataset:{ROWS}"}
    twin, run = stack.submit(spec), stack.submit(spec)
    succeeds(stack, twin)
    stopped_at(stack, run, stepping(9, 15))
    step, plan = run.record().progress_step, run.plan()
    assert run.record().status is Status.QUEUED and step >= 8
    uploads = stack.home / "uploads"

    def paused_for(code: str) -> JobPaused:
        """The pause that follows once the stores are gone."""
        lose(stack)
        mark = run.record().number
        stack.start_if_gone("train")
        if run.record().status is Status.PAUSED:
            assert stack.post(run, "resume").status_code == 200
        fact = stack.wait_for_event(run, "job.paused", "job.failed", "job.succeeded", after=mark).fact
        assert isinstance(fact, JobPaused) and fact.error is not None and fact.error.code == code, fact
        return fact

    # What cannot be made again pauses it.
    shutil.rmtree(uploads)
    gone = paused_for("dataset_missing")
    assert gone.error is not None and ROWS in gone.error.message
    assert gone.error.hint == f"upload it: `longhaul datasets add {ROWS}`; then `longhaul resume {run.id}`"

    upload(stack, rows.partition(b"\n")[2])
    changed = paused_for("content_changed")
    assert changed.error is not None and "not what this job has trained on so far" in changed.error.message
    hint = changed.error.hint or ""
    assert hint == (
        f"bring it back as it was; `longhaul datasets rm {ROWS}` and `longhaul datasets add FILE --name {ROWS}` do "
        f"it; then `longhaul resume {run.id}`"
    )

    # What can be is made again, and it continues as if nothing had been.
    lose(stack)
    mark = run.record().number
    for command in re.findall(r"`longhaul ([^`]*)`", hint):
        words = command.replace("FILE", str(data_of(stack) / "rows.jsonl")).split()
        words += ["--yes"] if words[:2] == ["datasets", "rm"] else []  # there is no terminal to ask on
        done = subprocess.run(
            [sys.executable, "-m", "longhaul.main", *words], cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=300, env=stack.environment | {"LONGHAUL_URL": stack.url},
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    succeeds(stack, run)
    assert reasons(run)[:2] == ["interrupted", "not_prepared"] and reasons(run)[-1] == "done"
    assert run.plan() == plan and run.record().restarts == 0
    assert [loaded.resumed_step for loaded in facts_of(run, ModelLoaded)] == [None, step]
    told = [event.type for event in run.events(after=mark) if event.type in ("job.prepared", "job.queued")]
    assert told == ["job.prepared", "job.queued"]
    assert (run.model / "model.safetensors").read_bytes() == (twin.model / "model.safetensors").read_bytes()
