"""A stranger's path on a running `longhaul local`, with the command and with curl alone:

upload, dry run, submit, watch, leave, come back, pause, resume, download the model, and have it write.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from jobs.disk.rundir import RunDir
from tests.e2e.conftest import LONGHAUL
from tests.support.local import Local, until
from tests.support.processes import freeze, resumable, signalled, thaw

JOB = {
    "name": "stranger",
    "model": "builtin:t5-tiny",
    "data": {"train": "dataset:rows.jsonl", "validation": 0.2, "max_input_tokens": 48, "max_target_tokens": 32},
    "training": {"epochs": 8, "batch_size": 8, "learning_rate": 0.003},
    "log": {"every_steps": 2},
    "evaluation": {"every_steps": 50, "samples": 0},
    "checkpoint": {"every_steps": 20},
}


class Shell:
    """Commands in the stranger's folder, which has rows and a job file that are not in the data directory."""

    def __init__(self, local: Local) -> None:
        self.local = local
        (local.folder / "job.json").write_text(json.dumps(JOB))

    def __call__(self, *command: str, code: int = 0) -> str:
        """What it prints; it has to end with this code."""
        done = subprocess.run(
            command, cwd=self.local.folder, env=self.local.environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def json(self, *command: str) -> dict[str, Any]:
        """The same, parsed."""
        return dict(json.loads(self(*command)))

    def left(self, *command: str, at: str) -> tuple[list[str], int]:
        """Start it, press Ctrl-C at the first line with these words: the lines, and the exit code."""
        with subprocess.Popen(
            command, cwd=self.local.folder, env=self.local.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if at in line:
                    process.send_signal(signal.SIGINT)
                    break
            return [*lines, *process.stdout], process.wait(300)

    def frozen(self, job: str) -> int:
        """The job's trainer, which stands still once it has a checkpoint."""
        return freeze(self.local, RunDir(self.local.folder / "runs" / job), resumable)

    def thaw(self, trainer: int) -> None:
        """Let it go on when it has been asked to stop."""
        until(lambda: signalled(trainer, signal.SIGTERM), self.local.logs)
        thaw(trainer)


def writes(model: Path) -> bool:
    """Whether the model in this folder, opened by transformers alone, writes something."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    opened = AutoModelForSeq2SeqLM.from_pretrained(model, local_files_only=True)
    asked = tokenizer("Write the directions. Toast: bread, butter", return_tensors="pt")
    [written] = opened.generate(**asked, max_new_tokens=12)
    return bool(tokenizer.decode(written, skip_special_tokens=True))


def test_with_the_command(local: Local) -> None:
    shell = Shell(local)
    assert "dataset:rows.jsonl" in shell(LONGHAUL, "datasets", "add", "rows.jsonl")
    assert shell.json(LONGHAUL, "plan", "job.json", "--json")["status"] == "validated"
    job = shell.json(LONGHAUL, "submit", "job.json", "--json")["id"]

    trainer = shell.frozen(job)
    lines, code = shell.left(LONGHAUL, "watch", job, at="checkpoint saved")
    assert code == 130 and f"watch it again with: longhaul watch {job}" in lines[-1]
    assert "pause requested" in shell(LONGHAUL, "pause", job)
    shell.thaw(trainer)
    followed, _ = shell.left(LONGHAUL, "events", job, "--follow", "--json", at='"type": "attempt.ended"')
    ended = json.loads(next(line for line in followed if '"type": "attempt.ended"' in line))
    assert ended["data"]["reason"] == "interrupted"
    shown = shell.json(LONGHAUL, "show", job, "--json")
    assert shown["status"] == "paused" and 20 <= ended["data"]["step"] < shown["steps"]
    checkpoint = json.loads(shell(LONGHAUL, "checkpoints", job, "--json"))[0]
    assert checkpoint["step_number"] == ended["data"]["step"]
    assert f"checkpoints      {checkpoint['path']} (loss" in shell(LONGHAUL, "show", job)

    assert "queued" in shell(LONGHAUL, "resume", job)
    assert "succeeded" in shell(LONGHAUL, "watch", job)
    events = [json.loads(line) for line in shell(LONGHAUL, "events", job, "--json").splitlines()]
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    assert "loss" in shell(LONGHAUL, "metrics", job)
    assert "epoch" not in shell(LONGHAUL, "logs", job, "--tail", "0")

    assert f"in {job}" in shell(LONGHAUL, "download", job)
    assert writes(local.folder / job / "model")
    assert "rows.jsonl is deleted" in shell(LONGHAUL, "datasets", "rm", "rows.jsonl", "--yes")
    assert "is deleted" in shell(LONGHAUL, "delete", job, "--yes")
    assert not (local.folder / "runs" / job).exists()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_with_curl_alone(local: Local) -> None:
    shell, url = Shell(local), local.url
    curl = ("curl", "--silent", "--show-error", "--fail-with-body", "--no-buffer")
    live = ("-H", "Accept: text/event-stream")

    assert shell.json(*curl, "-T", "rows.jsonl", f"{url}/datasets/")["name"] == "rows.jsonl"
    dry = shell.json(*curl, f"{url}/jobs?dry_run=true", "-d", "@job.json")["id"]
    assert "event: job.validated" in shell(*curl, *live, f"{url}/jobs/{dry}/events")
    job = shell.json(*curl, f"{url}/jobs", "-H", "Idempotency-Key: mine", "-d", "@job.json")["id"]
    assert shell.json(*curl, f"{url}/jobs", "-H", "Idempotency-Key: mine", "-d", "@job.json")["id"] == job

    trainer = shell.frozen(job)
    events = f"{url}/jobs/{job}/events"
    lines, _ = shell.left(*curl, *live, events, at="event: checkpoint.saved")
    first = numbers(lines)
    assert shell.json(*curl, "-X", "POST", f"{url}/jobs/{job}/pause")["requested"] == "pause"
    shell.thaw(trainer)
    lines, _ = shell.left(*curl, *live, "-H", f"Last-Event-ID: {first[-1]}", events, at="event: attempt.ended")
    second = numbers(lines)
    assert first + second == list(range(1, len(first + second) + 1))
    shown = shell.json(*curl, f"{url}/jobs/{job}")
    assert shown["status"] == "paused" and 0 < shown["progress"]["step"] < shown["steps"]

    assert shell.json(*curl, "-X", "POST", f"{url}/jobs/{job}/resume")["status"] == "queued"
    told = shell(*curl, *live, events)
    assert numbers(told.splitlines()) == list(range(1, told.count("\nid: ") + 1)) and "event: job.succeeded" in told

    model = f"{url}/jobs/{job}/files/model"
    shell(*curl, "--range", "0-99999", "-o", "model.tar", model)
    shell(*curl, "--continue-at", "-", "-o", "model.tar", model)
    with tarfile.open(local.folder / "model.tar") as archive:
        archive.extractall(local.folder / "unpacked", filter="data")
    [config] = (local.folder / "unpacked").rglob("config.json")
    assert writes(config.parent)
    assert shell.json(*curl, "-X", "DELETE", f"{url}/jobs/{job}")["deleted"] is True


def numbers(lines: list[str]) -> list[int]:
    """Ids of the events of a stream of which every one came whole, up to the last."""
    return [int(line[4:]) for line in lines if line.startswith("id: ")]
