"""A whole small job through the real stages: its trainer is killed after a checkpoint, and the next attempt resumes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from jobs.attempt import Finished, Noted
from jobs.disk.rundir import RunDir, create
from jobs.events import JobSubmitted
from jobs.process.lifeline import PARENT_PID
from jobs.reasons import Reason
from jobs.spec import parse_spec
from jobs.text.units import format_duration
from jobs.trainer_facts import CheckpointSaved, ModelLoaded
from worker.training.doctor.finding import Check, Examination, Finding, judge

ROWS, STEPS, SAVE_EVERY = 160, 40, 5
LOOK_S = 0.05
WORDS = ("knead", "bake", "the", "bread", "with", "water", "salt", "flour", "oil", "until", "golden", "brown")


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name."""
    return {"resume": lambda: save_kill_resume(examination)}


def save_kill_resume(examination: Examination) -> Finding:
    """`built-in` model: check, prepare, train until a checkpoint, SIGKILL, train to the end."""
    begun = time.perf_counter()
    run = make_job(examination.folder)
    for stage in ("check", "prepare"):
        code = start(stage, run, examination).wait()
        if code:
            return judge("resume", f"{stage} ends with code {code}: {last_line(run)}", fail=True, hint="report it")
    trainer = start("train", run, examination)
    while trainer.poll() is None and not saved_steps(run):
        time.sleep(LOOK_S)
    killed = trainer.poll() is None
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    steps = saved_steps(run)
    if not killed or not steps:
        return judge("resume", f"the first attempt ended by itself: {last_line(run)}", fail=True, hint="report it")
    code = start("train", run, examination, "--attempt", "2").wait()
    lines = run.attempt_lines(2)
    resumed = [
        line.fact.resumed_step for line in lines if isinstance(line, Noted) and isinstance(line.fact, ModelLoaded)
    ]
    done = bool(lines) and isinstance(lines[-1], Finished) and lines[-1].reason is Reason.DONE and code == 0
    right = done and bool(resumed) and resumed[0] is not None and resumed[0] >= steps[0] and run.model.is_dir()
    return judge(
        "resume", f"killed after the checkpoint of step {steps[-1]}; the next attempt resumed at step "
        f"{resumed[0] if resumed else None} and {'left a model' if done else f'failed: {last_line(run)}'}; "
        f"{format_duration(time.perf_counter() - begun)}",
        limit="resumes, and completes", fail=not right, hint="report it: jobs do not survive a crash here",
    )  # fmt: skip


def make_job(folder: Path) -> RunDir:
    """Rows of a few words, to be copied."""
    draw = random.Random(0)
    (folder / "data").mkdir()
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + f" {number}" for number in range(ROWS)]
    rows = [json.dumps({"input": text, "target": text}) for text in texts]
    (folder / "data" / "rows.jsonl").write_text("\n".join(rows) + "\n")
    spec = parse_spec(
        {
            "model": "builtin:t5-tiny",
            "data": {"train": "rows.jsonl", "validation": 0.0},
            "training": {"batch_size": 16, "epochs": STEPS * 16 // ROWS, "learning_rate": 1e-3},
            "memory": {"micro_batch": 8, "optimizer": "adamw"},
            "speed": {"compile": False},
            "evaluation": {"samples": 0},
            "checkpoint": {"every_steps": SAVE_EVERY, "every_minutes": None, "keep": 2},
        }
    )
    (folder / "runs").mkdir()
    submitted = JobSubmitted(name="doctor", model=spec.model, spec_sha256=spec.sha256())
    run, _ = create(folder / "runs", "doctor", spec, submitted)
    return run


def start(stage: str, run: RunDir, examination: Examination, *more: str) -> subprocess.Popen[bytes]:
    """One stage, as a worker starts it; it ends with this process at the latest."""
    places = {
        f"LONGHAUL_{name.upper()}": os.fspath(examination.folder / name) for name in ("data", "models", "prepared")
    }
    environment = {
        **os.environ, **places, "LONGHAUL_UPLOADS": places["LONGHAUL_DATA"], "LONGHAUL_DEVICE": examination.device,
        PARENT_PID: str(os.getpid()), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with open(run.trainer_log, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "worker.training", stage, os.fspath(run.path), *more],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def saved_steps(run: RunDir) -> list[int]:
    """Of the checkpoints that the first attempt has noted."""
    facts = [line.fact for line in run.attempt_lines(1) if isinstance(line, Noted)]
    return [fact.step for fact in facts if isinstance(fact, CheckpointSaved)]


def last_line(run: RunDir) -> str:
    """Of the trainer's log."""
    lines = run.trainer_log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it wrote no log"
