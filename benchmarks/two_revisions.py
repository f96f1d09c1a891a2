"""Two revisions of this repository train the same jobs: are weights, losses and evaluations equal bit for bit?

    python -m benchmarks.two_revisions [BEFORE [AFTER]] [--optimizer NAME] [--micro-batch 8]

Each revision is unpacked into a temporary folder and runs there as real processes: Redis, service, workers. It trains
`builtin:t5-tiny` on recipes of `examples/` with a fixed seed, with each optimizer. Every job is paused and resumed
at step 7 and killed (-9) at step 20. `KEYS_BEFORE` has the names that job keys had in revisions before `training`.
Without a name: HEAD. What is the same on both sides is trained once.

`weights_equal`: the files of the final weights; `tensors_differing` and `max_abs_difference` say how far they are
apart. `losses_equal`: every logged loss, gradient norm and learning rate (of a step that was redone, the last).
`evaluations_equal`: every validation loss. `first_difference`: the first step that was logged otherwise.

`--micro-batch 8` is a whole batch at once. With 4 memory runs out in the second micro-batch of a step after step 3, but
only in revisions whose trainers are not forked: forked ones do not read what makes it run out.
`--learning-rate-after` gives AFTER another learning rate, as a control: that must be unequal.

JSON on the last line; exit code 1 if anything is unequal.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file

from benchmarks.command_line import ROOT, parse
from jobs.disk.rundir import RunDir
from tests.support.processes import trainers
from tests.support.stack import Stack

KEYS = ("before", "after", "learning_rates", "micro_batch", "jobs", "equal")
OPTIMIZERS = ("adamw", "adafactor")
ROWS, BATCH, EPOCHS = 100, 8, 3
LEARNING_RATE = 5e-3
SHORTAGE_AT, PAUSE_AT, KILL_AT, CHECKPOINT_EVERY = 3, 7, 20, 8
KEYS_BEFORE = {
    "training": "schedule",
    "evaluation": "evaluate",
    "memory.activation_checkpointing": "memory.recompute_layers",
    "memory.empty_cache_steps": "memory.cache_clear_every",
}
"""Of the keys that `job` sets."""

# Python imports a module of this name from PYTHONPATH when it starts.
SITECUSTOMIZE = f"""
import json
import sys
from pathlib import Path

run = Path(sys.orig_argv[-3]) if sys.orig_argv[-2:] == ["--attempt", "1"] else None
if run is not None and json.loads((run / "spec.json").read_text())["memory"]["micro_batch"] < {BATCH}:
    import torch

    logged, backward, seen = run / "metrics.jsonl", torch.Tensor.backward, 0

    def fails_once(*args, **more):
        global seen
        if seen < 2 and logged.exists() and logged.read_bytes().count(b"\\n") >= {SHORTAGE_AT}:
            seen += 1
            if seen == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return backward(*args, **more)

    torch.Tensor.backward = fails_once
"""


@dataclass(frozen=True)
class Trained:
    """What is compared of a job."""

    weights: dict[str, torch.Tensor]
    sha256: str
    """Of the file of weights."""
    logged: dict[int, tuple[float, float, float]]
    """Loss, gradient norm and learning rate by step."""
    evaluations: dict[int, float]
    """Validation loss by step."""


def main(argv: list[str]) -> int:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_revisions")
    parser.add_argument("before", nargs="?", default="HEAD")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="only this one")
    parser.add_argument("--micro-batch", type=int, default=BATCH)
    parser.add_argument("--learning-rate-after", type=float, default=LEARNING_RATE)
    arguments = parse(parser, argv, optimizer=["adamw"])
    rates = {"before": LEARNING_RATE, "after": arguments.learning_rate_after}
    trained: dict[str, dict[str, Trained]] = {}
    revisions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        for side, rate in rates.items():
            revisions[side] = short(vars(arguments)[side])
            if side == "after" and (revisions["before"], rates["before"]) == (revisions["after"], rate):
                trained[side] = trained["before"]
                continue
            folder = Path(name) / side
            unpack(revisions[side], folder / "tree")
            trained[side] = train_all(folder, arguments.optimizer or OPTIMIZERS, arguments.micro_batch, rate)
    jobs = {name: compared(before, trained["after"][name]) for name, before in trained["before"].items()}
    equal = all(job["weights_equal"] and job["losses_equal"] and job["evaluations_equal"] for job in jobs.values())
    print(
        json.dumps(
            {**revisions, "learning_rates": rates, "micro_batch": arguments.micro_batch, "jobs": jobs, "equal": equal}
        )
    )
    return 0 if equal else 1


# -- revisions ---------------------------------------------------------------------------------------------------------


def short(revision: str) -> str:
    """The abbreviated hash of a commit."""
    return _git("rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()


def unpack(revision: str, folder: Path) -> None:
    """The files of a revision, without its history."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", revision))) as archive:
        archive.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


# -- one revision ------------------------------------------------------------------------------------------------------


def train_all(folder: Path, optimizers: Sequence[str], micro_batch: int, learning_rate: float) -> dict[str, Trained]:
    """Every job with the code in `folder/tree`, one after the other."""
    tree, faults, data = folder / "tree", folder / "faults", folder / "data"
    for each in (faults, data):
        each.mkdir()
    rows = (ROOT / "examples/recipes.jsonl").read_text().splitlines(keepends=True)[:ROWS]
    (data / "recipes.jsonl").write_text("".join(rows))
    (faults / "sitecustomize.py").write_text(SITECUSTOMIZE)
    renamed = {} if "training" in json.loads((tree / "examples/job.json").read_text()) else KEYS_BEFORE
    found = {}
    with Stack(folder / "home", data=data, environment={"PYTHONPATH": os.fspath(faults)}, root=tree) as stack:
        stack.start("service", "check", "prepare", "train")
        for optimizer in optimizers:
            found[optimizer] = train(stack, with_keys(job(optimizer, micro_batch, learning_rate), renamed))
            print(f"{folder.name}: {optimizer}: {found[optimizer].sha256[:16]}", flush=True)
    return found


def job(optimizer: str, micro_batch: int, learning_rate: float) -> dict[str, Any]:
    """33 steps or so, evaluated before the first, at every 12th and after the last."""
    return {
        "model": "builtin:t5-tiny",
        "data": {"train": "recipes.jsonl", "validation": 0.1, "max_input_tokens": 48, "max_target_tokens": 32},
        "training": {"epochs": EPOCHS, "batch_size": BATCH, "learning_rate": learning_rate, "dropout": 0.1, "seed": 42},
        "memory": {
            "micro_batch": micro_batch, "optimizer": optimizer, "activation_checkpointing": 0, "empty_cache_steps": 5,
        },
        "log": {"every_steps": 1},
        "checkpoint": {"every_steps": CHECKPOINT_EVERY},
        "evaluation": {"every_steps": 12, "samples": 1},
    }  # fmt: skip


def with_keys(spec: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The same job with other names of keys, given as dotted paths."""
    named: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, Mapping):
            value = {
                renamed.get(f"{key}.{inner}", f"{key}.{inner}").partition(".")[2]: each for inner, each in value.items()
            }
        named[renamed.get(key, key)] = value
    return named


def train(stack: Stack, spec: Mapping[str, Any]) -> Trained:
    """One job, with everything that befalls it."""
    answer = requests.post(f"{stack.url}/jobs", json=spec, timeout=10)
    assert answer.status_code == 202, answer.text
    run = RunDir(stack.runs / answer.json()["id"])
    await_step(stack, run, PAUSE_AT)
    assert stack.post(run, "pause").ok
    await_status(stack, run, "paused")
    assert stack.post(run, "resume").ok
    await_step(stack, run, KILL_AT)
    (trainer,) = trainers(run)
    os.kill(trainer, signal.SIGKILL)
    await_status(stack, run, "succeeded")

    facts = [event["fact"] for event in lines(run.path / "events.jsonl")]
    ends = [fact["reason"] for fact in facts if fact["type"] == "attempt.ended"]
    recoveries = [fact["type"] for fact in facts].count("oom.recovered")
    cut = spec["memory"]["micro_batch"] < BATCH
    killed = "crash" if "crash" in ends else "killed"  # as revisions before called it
    assert (ends, recoveries) == (["interrupted", killed, "done"], int(cut)), (ends, recoveries)
    weights = run.model / "model.safetensors"
    return Trained(
        load_file(weights),
        hashlib.sha256(weights.read_bytes()).hexdigest(),
        {
            row["step"]: (row["loss"], row["grad_norm"], row["learning_rate"])
            for row in lines(run.path / "metrics.jsonl")
        },
        {fact["step"]: fact["loss"] for fact in facts if fact["type"] == "evaluation.finished"},
    )


def lines(file: Path) -> list[dict[str, Any]]:
    """JSON by line: the readers of this revision would not know the names of another."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def await_step(stack: Stack, run: RunDir, step: int) -> None:
    """Until that step is logged."""
    file = run.path / "metrics.jsonl"
    stack.wait_for(lambda: (file.exists() and file.read_bytes().count(b"\n") >= step) or None, f"step {step}", 300)


def await_status(stack: Stack, run: RunDir, status: str) -> None:
    """Until the service says so."""

    def there() -> bool | None:
        found = requests.get(f"{stack.url}/jobs/{run.id}", timeout=10).json()["status"]
        assert found != "failed", stack.logs()
        return found == status or None

    stack.wait_for(there, f"{run.id} {status}", 300)


# -- comparison --------------------------------------------------------------------------------------------------------


def compared(before: Trained, after: Trained) -> dict[str, Any]:
    """One job in both revisions."""
    assert before.weights.keys() == after.weights.keys()
    pairs = [(tensor, after.weights[name]) for name, tensor in before.weights.items()]
    farthest = max(float((one.double() - other.double()).abs().max()) for one, other in pairs)
    steps = sorted(before.logged.keys() | after.logged.keys())
    return {
        "weights_before": before.sha256,
        "weights_after": after.sha256,
        "weights_equal": before.sha256 == after.sha256,
        "losses_equal": before.logged == after.logged,
        "evaluations_equal": before.evaluations == after.evaluations,
        "tensors": len(pairs),
        "tensors_differing": sum(not torch.equal(one, other) for one, other in pairs),
        "max_abs_difference": farthest,
        "steps": len(steps),
        "first_difference": next((step for step in steps if before.logged.get(step) != after.logged.get(step)), None),
        "validation_losses": [
            [each.evaluations.get(step) for each in (before, after)] for step in sorted(before.evaluations)
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
