"""The model and the data store are removed under a job that has a checkpoint, as `docker compose down -v` does."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import requests

from jobs.disk.rundir import RunDir
from jobs.events import JobPaused, ModelLoaded
from jobs.state import Status
from tests.facts import facts_of, reasons
from tests.stack import ROOT, Stack, tiny_job

ROWS = "rows.jsonl"


def upload(stack: Stack, rows: Path) -> None:
    answer = requests.put(f"{stack.url}/datasets/{ROWS}", data=rows.read_bytes(), timeout=30)
    assert answer.status_code in (200, 201), answer.text


def stopped_half_way(stack: Stack) -> RunDir:
    """A job of uploaded rows with a checkpoint at step 8 of 16 or later; its worker is stopped."""
    spec = tiny_job(name="stopped")
    spec["data"] = {**spec["data"], "train": f"dataset:{ROWS}"}
    run = stack.submit(spec)
    stack.wait_for_event(run, "checkpoint.saved")
    stack.stop("train")
    assert run.record().status is Status.QUEUED and run.record().progress_step >= 8
    return run


def test_what_was_prepared_is_made_again_and_the_job_goes_on_as_if_nothing_had_been(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare", "train")
        upload(stack, data / ROWS)
        spec = tiny_job(name="twin")
        spec["data"] = {**spec["data"], "train": f"dataset:{ROWS}"}
        twin = stack.submit(spec)
        stack.wait_for_event(twin, "job.succeeded", "job.failed")
        run = stopped_half_way(stack)
        before, step = run.plan(), run.record().progress_step
        for store in ("models", "prepared"):
            shutil.rmtree(stack.home / store)
        stack.start("train")
        assert stack.wait_for_event(run, "job.succeeded", "job.failed", "job.paused").type == "job.succeeded"
        assert reasons(run) == ["interrupted", "not_prepared", "done"]
        assert run.plan() == before and run.record().restarts == 0
        assert [loaded.resumed_step for loaded in facts_of(run, ModelLoaded)] == [None, step]
        told = [event.type for event in run.events() if event.type in ("job.unprepared", "job.prepared", "job.queued")]
        assert told == ["job.prepared", "job.queued", "job.queued", "job.unprepared", "job.prepared", "job.queued"]
    assert (run.model / "model.safetensors").read_bytes() == (twin.model / "model.safetensors").read_bytes()


def test_what_cannot_be_made_again_pauses_the_job_and_names_the_file(tmp_path: Path, data: Path) -> None:
    with Stack(tmp_path / "home", data=data) as stack:
        stack.start("service", "check", "prepare", "train")
        upload(stack, data / ROWS)
        run = stopped_half_way(stack)
        uploads = stack.home / "uploads"

        def paused_for(code: str, change: Callable[[], object]) -> JobPaused:
            """The pause that follows once the stores are gone and that was done to the uploads."""
            for store in ("models", "prepared"):
                shutil.rmtree(stack.home / store, ignore_errors=True)
            change()
            mark = run.record().number
            if run.record().status is Status.PAUSED:
                assert stack.post(run, "resume").status_code == 200
            fact = stack.wait_for_event(run, "job.paused", "job.failed", "job.succeeded", after=mark).fact
            assert isinstance(fact, JobPaused) and fact.error is not None and fact.error.code == code, fact
            return fact

        stack.start("train")
        gone = paused_for("dataset_missing", lambda: shutil.rmtree(uploads))
        assert gone.error is not None and ROWS in gone.error.message
        assert gone.error.hint == f"upload it: `longhaul datasets add {ROWS}`; then `longhaul resume {run.id}`"

        other = tmp_path / "other.jsonl"
        other.write_text("".join((data / ROWS).read_text().splitlines(keepends=True)[1:]))
        changed = paused_for("content_changed", lambda: upload(stack, other))
        assert changed.error is not None and "not what this job has trained on so far" in changed.error.message

        hint = changed.error.hint or ""
        assert hint == (
            f"bring it back as it was; `longhaul datasets rm {ROWS}` and `longhaul datasets add FILE --name {ROWS}` do "
            f"it; then `longhaul resume {run.id}`"
        )
        for command in re.findall(r"`longhaul ([^`]*)`", hint):
            words = command.replace("FILE", str(data / ROWS)).split()
            done = subprocess.run(
                [sys.executable, "-m", "longhaul.main", *words], cwd=ROOT, capture_output=True, text=True, check=False,
                timeout=60, env=stack.environment | {"LONGHAUL_URL": stack.url},
            )  # fmt: skip
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert stack.wait_for_event(run, "job.succeeded", "job.failed").type == "job.succeeded"
