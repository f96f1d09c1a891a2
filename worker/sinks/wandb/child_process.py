"""The process that holds one W&B run: reads requests as JSON lines on stdin, answers each on stdout.

    {"do": "init", "project": …, "id": …, "online": true}    → {"mode": "online", "url": …}   or offline, with "why"
    {"do": "log", "rows": [{"train/step": 10, …}], "first": 0} → {"logged": 1}      once they are in the run's file
    {"do": "alert", "title": …, "text": …, "level": "WARN"}  → {"alerted": true}
    {"do": "finish", "exit_code": 0, "summary": {…}}         → {"finished": true, "unsent": null}   and the process ends

A process of its own, because W&B's library is one run per process, blocks, and must not take publish with it.

No row is lost: what was answered is in the run's `.wandb` file. What a server did not take in time stays there, and is
sent before the same run is opened again (`send_unsent`), or by a person with `wandb sync`. A job is one run, online,
offline, or both by turns: all its files have the same id, and W&B's own step never goes back from one to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import wandb

from worker.sinks.wandb.protocol import AlertRequest, ArtifactRequest, FinishRequest, InitRequest, LogRequest, Request

Answer = dict[str, str | int | None]
INIT_TIMEOUT_S = 5.0
SYNC_TIMEOUT_S = 30.0
WRITTEN_WITHIN_S = 0.2
"""A row is in the run's `.wandb` file one flush interval and this after `log`, whoever is killed then (measured)."""
SUMMARY = {
    "train/loss": "min,last", "eval/loss": "min,last", "train/rows_per_s": "mean,last", "train/mfu": "mean,last",
    "train/memory_bytes": "max", "gpu/temperature_c": "max",
}  # fmt: skip
"""What the summary of a run says of a figure; of all others the last value."""
HIDDEN = (
    "train/attempt", "train/epoch", "train/eta_s", "train/cache_clears", "train/cache_clear_s",
    "train/cache_freed_bytes", "train/memory_planned_bytes", "eval/event", "eval/rows", "eval/seconds",
)  # fmt: skip
"""Figures that are kept and can be plotted, but have no panel of their own from the beginning."""
ALERT_AGAIN_S = 3600
"""W&B passes alerts of the same title on once in so long."""


def main() -> None:
    """Answer until asked to finish, or until stdin ends (publish is stopping)."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever the library prints is not an answer
    run: wandb.Run | None = None
    flush_s = 0.0
    for line in sys.stdin.buffer:
        message: Request = json.loads(line)
        if message["do"] == "init":
            flush_s = message["flush_s"]
            run, answer = begin(message)
        else:
            assert run is not None
            if message["do"] == "log":
                answer = write(run, message, flush_s + WRITTEN_WITHIN_S)
            elif message["do"] == "alert":
                answer = alert(run, message)
            else:
                answer = finish(run, message)
        answers.write(json.dumps(answer) + "\n")
        if message["do"] == "finish":
            return


def begin(message: InitRequest) -> tuple[wandb.Run, Answer]:
    """Open the job's run. Offline it gets a further file; `wandb sync` sends the files of a run in order of time."""
    job = message["id"]
    why = message["why_offline"]
    place = Path(message["folder"], "wandb")
    before = set(place.glob(f"*run-*-{job}"))
    for folder in before:
        unmark(folder, job)
    if message["online"]:
        try:
            send_unsent(before, job, message["folder"])
            run = init(message, mode="online", id=job, resume="allow")
        except (wandb.Error, OSError, TimeoutError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            for stub in set(place.glob(f"*run-*-{job}")) - before:
                shutil.rmtree(stub, ignore_errors=True)  # an empty run: `wandb sync` would show it as one that ended
        else:
            return run, {"mode": "online", "url": run.url, "artifacts": refer(run, message["artifacts"])}
    while any(place.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{job}")):
        time.sleep(0.1)  # W&B names files by the second, and would write over this one
    run = init(message, mode="offline", id=job)
    return run, {"mode": "offline", "why": why, "artifacts": refer(run, message["artifacts"])}


def send_unsent(folders: set[Path], job: str, home: str) -> None:
    """Send what earlier processes of this run wrote and did not send (offline, killed, or the server was away).

    Before the run is opened again: W&B keeps counting from what the server has, so rows sent later would collide with
    newer ones. Raises TimeoutError when the server does not take them: then the rows to come go into an offline run.
    """
    unsent = sorted(str(folder) for folder in folders if not synced(folder, job).exists())
    if not unsent:
        return
    # Tied to this process by the same means as this process to publish (jobs.process.lifeline).
    command = [sys.executable, "-m", "jobs.process.lifeline", str(os.getpid()), sys.executable, "-m", "wandb", "sync"]
    command += ["--include-online", *unsent]
    environment = os.environ | {"WANDB_DIR": home}  # where it logs; else in the working directory
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=SYNC_TIMEOUT_S, check=False)
    if left := [folder for folder in unsent if not synced(Path(folder), job).exists()]:
        raise TimeoutError(f"earlier rows are not sent yet ({', '.join(left)})")


def synced(folder: Path, job: str) -> Path:
    """W&B's own mark beside a run's file: all of it is on the server. `wandb sync` leaves such runs out."""
    return folder / f"run-{job}.wandb.synced"


def unmark(folder: Path, job: str) -> None:
    """Remove the mark from a file that was synced while it was being written: what came since would be left out."""
    mark = synced(folder, job)
    with contextlib.suppress(FileNotFoundError):
        if mark.stat().st_mtime_ns < (folder / f"run-{job}.wandb").stat().st_mtime_ns:
            mark.unlink()


def init(message: InitRequest, **how: Any) -> wandb.Run:
    """A run with its own step axis and bounded waits."""
    run = wandb.init(
        project=message["project"],
        entity=message["entity"],
        name=message["name"],
        group=message["group"],
        job_type=message["job_type"],
        config=message["config"],
        tags=message["tags"],
        notes=message["notes"],
        dir=message["folder"],
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=message["finish_s"],
            finish_timeout_raises=True,
            x_transaction_log_flush_interval=message["flush_s"],
            x_disable_stats=True,  # figures of this process and this container say nothing about the run
            x_disable_meta=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            console="off",
            silent=True,
        ),
        **how,
    )
    run.define_metric("train/step", hidden=True)
    for group in ("train", "eval", "gpu", "host"):
        run.define_metric(f"{group}/*", step_metric="train/step")
    for name, best in SUMMARY.items():
        run.define_metric(name, step_metric="train/step", summary=best)
    for name in HIDDEN:
        run.define_metric(name, step_metric="train/step", hidden=True)
    return run


def write(run: wandb.Run, message: LogRequest, written_after_s: float) -> Answer:
    """Hand over rows, and answer once they would survive a kill. A table goes with the last row."""
    rows: list[dict[str, object]] = [{**row} for row in message["rows"]]
    table = message.get("table")
    if table and table["data"]:
        samples = wandb.Table(columns=table["columns"], data=table["data"])
        # Bound here, it is a file of the run with a row that points to it. Left to `log`, it would be an artifact too,
        # for which `log` asks the server: it would wait, or raise, when that is away.
        samples.bind_to_run(run, table["key"], message["rows"][-1]["train/step"])
        rows[-1][table["key"]] = samples
    for number, row in enumerate(rows, message["first"]):
        run.log(row, step=max(number, run.step), commit=True)
    time.sleep(written_after_s)
    return {"logged": len(rows)}


def alert(run: wandb.Run, message: AlertRequest) -> Answer:
    """Offline it is kept in the run's file, and sent with it."""
    run.alert(message["title"], message["text"], level=message["level"], wait_duration=ALERT_AGAIN_S)
    return {"alerted": True}


def refer(run: wandb.Run, artifacts: list[ArtifactRequest]) -> str | None:
    """Add artifacts by reference; why one is left out. The same again is no new version of it."""
    for each in artifacts:
        artifact = wandb.Artifact(each["name"], each["type"], metadata={**each["metadata"]})
        try:
            # No checksum: that of gigabytes takes minutes.
            artifact.add_reference(each["reference"], name=each["path"], checksum=False)
            run.log_artifact(artifact)
        except (wandb.Error, OSError, ValueError) as error:
            return f"{each['name']}: {' '.join(str(error).split())}"
    return None


def finish(run: wandb.Run, message: FinishRequest) -> Answer:
    """End the run within bounds. `unsent` is the folder to sync later, if the server did not take everything."""
    if message["alert"]:
        alert(run, message["alert"])
    left_out = refer(run, message["artifacts"])
    run.summary.update(message["summary"])
    folder = Path(run.dir).parent
    try:
        run.finish(exit_code=message["exit_code"])
    except TimeoutError:
        return {"finished": True, "unsent": str(folder), "artifacts": left_out}
    wandb.teardown()  # waits for the library's own process, which may write to the file after `finish` (milliseconds)
    if run.offline:
        unmark(folder, run.id)
    else:
        synced(folder, run.id).touch()
    return {"finished": True, "unsent": None, "artifacts": left_out}


if __name__ == "__main__":
    main()
