"""The process that holds one W&B run: told what to do in JSON lines on stdin, answers each on stdout.

    {"do": "init", "project": …, "id": …, "online": true}    → {"mode": "online"}   or offline, with "why"
    {"do": "log", "rows": [{"train/step": 10, …}]}           → {"logged": 1}        once they are in the run's file
    {"do": "finish", "exit_code": 0, "summary": {…}}         → {"finished": true}   and the process ends

A process of its own, because W&B's library is one run per process, blocks, and must not take publish with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import wandb

INIT_TIMEOUT_S = 5.0
FINISH_TIMEOUT_S = 20.0
WRITTEN_WITHIN_S = 0.2
"""A row is in the run's `.wandb` file one flush interval and this after `log`, whoever is killed then (measured)."""


def main() -> None:
    """Converse until told to finish, or until stdin ends (publish is stopping)."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # whatever the library prints is not an answer
    run: wandb.Run | None = None
    flush_s = 0.0
    for line in sys.stdin.buffer:
        message = json.loads(line)
        match message["do"]:
            case "init":
                flush_s = message["flush_s"]
                run, answer = begin(message)
            case "log":
                assert run is not None
                answer = write(run, message["rows"], flush_s + WRITTEN_WITHIN_S)
            case "finish":
                assert run is not None
                run.summary.update(message["summary"])
                run.finish(exit_code=message["exit_code"])
                answer = {"finished": True}
            case unknown:
                raise ValueError(f"unknown: {unknown}")
        answers.write(json.dumps(answer) + "\n")
        if message["do"] == "finish":
            return


def begin(message: dict[str, Any]) -> tuple[wandb.Run, dict[str, Any]]:
    """Online one run per job; offline one run per start of publish, in the job's group (offline runs cannot resume)."""
    job = message["id"]
    why = message["why_offline"]
    if message["online"]:
        place = Path(message["folder"], "wandb")
        before = set(place.glob(f"run-*-{job}"))
        try:
            run = init(message, mode="online", id=job, resume="allow")
        except (wandb.Error, OSError, TimeoutError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            for stub in set(place.glob(f"run-*-{job}")) - before:
                shutil.rmtree(stub, ignore_errors=True)  # an empty run: `wandb sync` would show it as one that ended
        else:
            return run, {"mode": "online"}
    return init(message, mode="offline", id=f"{job}-{uuid.uuid4().hex[:8]}"), {"mode": "offline", "why": why}


def init(message: dict[str, Any], **how: Any) -> wandb.Run:
    """A run with its own step axis and bounded waits."""
    run = wandb.init(
        project=message["project"],
        entity=message["entity"],
        name=message["name"],
        group=message["id"],
        config=message["config"],
        dir=message["folder"],
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
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
    run.define_metric("train/step")
    run.define_metric("train/*", step_metric="train/step")
    run.define_metric("eval/*", step_metric="train/step")
    return run


def write(run: wandb.Run, rows: list[dict[str, Any]], written_after_s: float) -> dict[str, Any]:
    """Hand over rows, and answer once they would survive a kill."""
    for row in rows:
        run.log(row)
    time.sleep(written_after_s)
    return {"logged": len(rows)}


if __name__ == "__main__":
    main()
