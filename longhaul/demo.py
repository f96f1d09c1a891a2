"""`longhaul demo` (what `make demo` runs): one job on example rows, from an empty folder to a model that writes.

Exit code 0 only if the job succeeded and the validation loss ended at least 40 % below its first value.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jobs.answers import Job, JsonObject
from jobs.text.units import format_duration, format_figure, format_share
from jobs.trainer_facts import EvaluationFinished
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.children import ROOT, ChildProcess, python
from longhaul.jobfile import BadInput
from longhaul.local import READY_WITHIN_S, ROLES, cannot_write, free_port
from longhaul.watch import watch

EXAMPLES = ROOT / "examples"
JOBS = {"recipes": "job.json", "chat": "chat.json", "classify": "tickets.json"}
"""By what is learned."""
MUST_FALL_BY = 0.40
PLOT_WITHIN_S = 20.0
STOP_WITHIN_S = 60.0
SAMPLES = 3


def run_demo(environment: Mapping[str, str], console: Console, *, kind: str, model: str | None, home: Path) -> int:
    """Start `longhaul local` in `home`, submit a job of `JOBS`, watch, show what came out, stop."""
    home = home.absolute()
    job = _job(home, JOBS[kind], model)
    with _local(environment, console, home) as api:
        _cancel_leftovers(api)
        made = api.submit(job)
        console.print(f"submitted examples/{JOBS[kind]} as {made['id']}", highlight=False)
        console.print(f"its page, until the demo ends: {api.url}/jobs/{made['id']}", highlight=False, soft_wrap=True)
        try:
            ended = watch(api, made["id"], console=console, history=100)
        except KeyboardInterrupt:
            console.print("\nstopping the demo; the next one starts over", highlight=False)
            return 130
        happened = [event["data"] for event in api.past_events(ended["id"]) if event["type"] == "evaluation.finished"]
        evaluations = [EvaluationFinished.model_validate(data) for data in happened]
        return _report(console, ended, evaluations, home)


def _job(home: Path, file: str, model: str | None) -> JsonObject:
    """An example job; its data, and a model given as a folder, are put into a data directory of the demo's own."""
    try:
        job: JsonObject = json.loads((EXAMPLES / file).read_text())
    except OSError as error:
        raise BadInput(f"{EXAMPLES / file}: {error.strerror}; run the demo from a clone") from None
    data = home / "data"
    try:
        data.mkdir(parents=True, exist_ok=True)
        for source in EXAMPLES.glob("*.jsonl*"):
            shutil.copyfile(source, data / source.name)
    except OSError as error:
        raise cannot_write(error, "--home DIR") from None
    if model is not None:
        job["model"] = model
        if os.path.isdir(model):
            copied = data / "model"
            shutil.rmtree(copied, ignore_errors=True)
            shutil.copytree(model, copied)
            job["model"] = "./model"
    return job


@contextmanager
def _local(environment: Mapping[str, str], console: Console, home: Path) -> Iterator[Longhaul]:
    """`longhaul local`, ready; stopped in order at the end. Without a W&B key nothing is sent there."""
    port = free_port()
    quiet = {} if environment.get("WANDB_API_KEY") else {"WANDB_MODE": "offline"}
    options = ["--home", str(home), "--port", str(port), "--data", str(home / "data"), "--runs", str(home / "runs")]
    child = ChildProcess(
        "local",
        [*python("longhaul.main", "local"), *options],
        {**quiet, **environment},
        home / "logs" / "local.log",
    )
    with Longhaul(f"http://127.0.0.1:{port}", environment.get("LONGHAUL_API_KEY") or None) as api:
        console.print(f"starting Redis, service and workers in {home} …", highlight=False)
        child.start()
        try:
            deadline = time.monotonic() + READY_WITHIN_S
            while not _up(api):
                if not child.running() or time.monotonic() > deadline:
                    raise BadInput(f"`longhaul local` did not start; {child.last_output()}")
                time.sleep(0.2)
            yield api
        finally:
            child.terminate()
            assert child.process is not None
            try:
                child.process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                child.process.send_signal(signal.SIGTERM)  # the second one stops at once
                child.wait(10.0)


def _up(api: Longhaul) -> bool:
    try:
        return api.ready() and {worker["stage"] for worker in api.workers()["data"]} >= set(ROLES)
    except (ApiError, Unreachable):
        return False


def _cancel_leftovers(api: Longhaul) -> None:
    """Jobs of a demo that was left in the middle would go first."""
    for job in list(api.all(status=("validating", "queued", "running", "paused"))):
        try:
            api.cancel(job["id"])
        except ApiError as error:
            if error.status != 409:  # it ended meanwhile: fine
                raise


def _report(console: Console, job: Job, evaluations: list[EvaluationFinished], home: Path) -> int:
    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    folder = home / job["run_dir"]
    if job["status"] != "succeeded":
        why = job["error"]["message"] if job["error"] else f"the job was {job['status']}"
        say(f"the demo failed: {why}", "bold red")
        say(f"trainer log  {folder / 'trainer.log'}\nall logs     {home / 'logs'}")
        return 1
    samples = evaluations[-1].samples[:SAMPLES] if evaluations else []
    for number, sample in enumerate(samples, start=1):
        say(f"\nsample {number}", "bold")
        say(f"  input      {_short(sample.input)}")
        say(f"  generated  {_short(sample.answer)}")
        say(f"  reference  {_short(sample.target)}", "dim")
    plot = folder / "loss.png"
    deadline = time.monotonic() + PLOT_WITHIN_S
    while not plot.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    say("")
    say(f"model        {home}/{job['fine_tuned_model']}")
    say(
        f"loss plot    {plot}"
        if plot.exists()
        else f"loss plot    missing after {format_duration(PLOT_WITHIN_S)}: {plot}"
    )
    say(f"trainer log  {folder / 'trainer.log'}")
    if not evaluations:
        say("there was no evaluation", "bold red")
        return 1
    first, last = evaluations[0].loss, evaluations[-1].loss
    fallen = 1 - last / first
    enough = fallen >= MUST_FALL_BY
    verdict = "" if enough else f", which is less than the {format_share(MUST_FALL_BY)} it should be"
    say(
        f"validation loss {format_figure(first)} → {format_figure(last)}: {format_share(fallen)} lower{verdict}",
        "bold green" if enough else "bold red",
    )
    return 0 if enough else 1


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= 160 else one_line[:157] + "…"
