"""Trials an hour of a sweep, and of Optuna with a process a trial and the stock `Trainer`: same rows, weights, space.

    python -m benchmarks.sweep [--data FILE] [--trials 24] [--seeds 1] [--rows 2000] [--epochs 2] [--at-once 2]

The file has rows with `text` and `label`, such as banking77; a fifth is held out. Both search learning rate, batch
size and warm-up with TPE, from the same weights (`builtin:roberta-tiny`, or the folder `--model`), and predict the
labels of the same held-out rows. Ours are the processes that a user starts (service, Redis, the workers, with as many
trials `--at-once` as there are cores), timed from `POST /sweeps` to its end. The other is what a tutorial shows: an
objective that starts a Python process, which reads and tokenizes the rows, trains, and evaluates once.

JSON on the last line: `trials_per_hour_ratio` (ours over the other's, the median over seeds), `best_accuracy` and
`peer_best_accuracy` (means over seeds), `start_s` (median seconds from a trial's attempt to its first step done),
`first_step_s` (seconds from `POST /jobs` to that of a job with nothing beside it, its rows prepared before). Exit
code 1 where the ratio is below 3, or the best accuracy is worse by more than two standard errors.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests

from benchmarks.command_line import TICKETS, parse
from jobs.disk.rundir import RunDir
from jobs.events import AttemptStarted
from jobs.sweeps.directory import find
from jobs.text.units import format_duration
from tests.support.stack import Stack

KEYS = (
    "benchmark", "trials", "rows", "at_once", "runs", "first_step_s", "trials_per_hour_ratio", "start_s",
    "best_accuracy", "peer_best_accuracy", "standard_error",
)  # fmt: skip
RATIO = 3.0
RATES, SIZES, WARMUP = (1e-4, 1e-2), [16, 32, 64], (0.0, 0.2)


def main(argv: list[str]) -> int:
    """Print what was measured; the exit code."""
    if argv[:1] == ["trial"]:
        return trial(json.loads(argv[1]))
    options = parsed(argv)
    with tempfile.TemporaryDirectory() as scratch:
        held_out = write_rows(options, Path(scratch))
        with Stack(Path(scratch) / "home", data=Path(scratch), environment=environment(options)) as stack:
            stack.start("service", "check", "prepare", "train", "publish")
            folder = prepared_model(stack, options)
            first_step_s = from_post_to_step(stack, options)
            found = [compared(stack, folder, options, seed) for seed in range(options.seeds)]
    result = {
        "benchmark": "sweep", "trials": options.trials, "rows": options.rows, "at_once": options.at_once, "runs": found,
        "first_step_s": first_step_s,
        "trials_per_hour_ratio": statistics.median(each["peer_s"] / each["ours_s"] for each in found),
        "start_s": statistics.median(start for each in found for start in each["starts_s"]),
        "best_accuracy": statistics.fmean(each["best"] for each in found),
        "peer_best_accuracy": statistics.fmean(each["peer_best"] for each in found),
    }  # fmt: skip
    rate = result["peer_best_accuracy"]
    result["standard_error"] = math.sqrt(2 * rate * (1 - rate) / held_out / options.seeds)
    print(json.dumps(result))
    as_accurate = result["best_accuracy"] >= rate - 2 * result["standard_error"]
    return 0 if options.smoke or (result["trials_per_hour_ratio"] >= RATIO and as_accurate) else 1


def parsed(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=TICKETS, help="rows with a text and a label")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; builtin:roberta-tiny without")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=len(os.sched_getaffinity(0)), help="trials of ours")
    return parse(parser, argv, trials=2, rows=40, epochs=1)


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Of our processes."""
    shared = max(1, len(os.sched_getaffinity(0)) // options.at_once)
    return {"LONGHAUL_TRIALS_AT_ONCE": str(options.at_once), "OMP_NUM_THREADS": str(shared)}


def write_rows(options: argparse.Namespace, scratch: Path) -> int:
    """train.jsonl and held_out.jsonl; how many are held out."""
    with gzip.open(options.data, "rt") if options.data.suffix == ".gz" else options.data.open() as lines:
        rows = random.Random(0).sample(found := lines.readlines(), min(options.rows, len(found)))
    held_out = len(rows) // 5
    (scratch / "held_out.jsonl").write_text("".join(rows[:held_out]))
    (scratch / "train.jsonl").write_text("".join(rows[held_out:]))
    if options.model is not None:
        shutil.copytree(options.model, scratch / "model")
    return held_out


def job(options: argparse.Namespace) -> dict[str, Any]:
    """What each trial of ours is."""
    return {
        "model": "builtin:roberta-tiny" if options.model is None else "./model",
        "task": "classification",
        "data": {"train": "train.jsonl", "validation": "held_out.jsonl", "max_input_tokens": 64},
        "training": {"epochs": options.epochs, "weight_decay": 0.0},
        "evaluation": {"every_steps": 10**6, "samples": 0},
        "checkpoint": {"every_steps": 10**6},
        "log": {"every_steps": 1},
        "integrations": {"wandb": False},
    }


def prepared_model(stack: Stack, options: argparse.Namespace) -> Path:
    """The folder of the weights from which both begin; what both need once is prepared then, too."""
    run = stack.submit({**job(options), "training": {"max_steps": 1}})
    stack.wait_for_event(run, "job.succeeded", "job.failed")
    return Path(str(run.plan().model.folder))


def from_post_to_step(stack: Stack, options: argparse.Namespace) -> float:
    """Of a job whose rows and model are there already."""
    began = time.time()
    run = stack.submit({**job(options), "training": {"max_steps": 2}})
    stack.wait_for_event(run, "job.succeeded", "job.failed")
    return run.metrics()[0].at - began


def compared(stack: Stack, folder: Path, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Both searches with one seed, one after the other."""
    space = {
        "training.learning_rate": {"range": list(RATES), "log": True},
        "training.batch_size": SIZES,
        "training.warmup_ratio": {"range": list(WARMUP)},
    }
    asked = {
        "job": job(options),
        "space": space,
        "metric": "accuracy",
        "max_trials": options.trials,
        "seed": seed * 1000,
    }
    began = time.monotonic()
    answer = requests.post(f"{stack.url}/sweeps", json=asked, timeout=10)
    answer.raise_for_status()
    sweep = find(stack.runs, answer.json()["id"])
    stack.wait_for(lambda: sweep.record().ended, "the end of the sweep", timeout=60 * options.trials)
    ours_s = time.monotonic() - began
    record = sweep.record()
    best = record.best(higher_is_better=True)
    assert best is not None and best.value is not None and record.counts == {"succeeded": options.trials}
    starts = [start_s(RunDir(stack.runs / each.jobs[0])) for each in record.trials]
    for role, process in stack.processes.items():  # what is timed now has the machine for itself
        assert process.poll() is None, role
    began = time.monotonic()
    accuracies = peer(stack, folder, options, seed)
    peer_s = time.monotonic() - began
    told = f"ours {format_duration(ours_s)}, the other {format_duration(peer_s)}"
    print(f"seed {seed}: {told} for {options.trials} trials", flush=True)
    return {"ours_s": ours_s, "peer_s": peer_s, "best": best.value, "peer_best": max(accuracies), "starts_s": starts}


def start_s(run: RunDir) -> float:
    """Seconds from the start of its attempt until the first step is done."""
    started = next(event.at for event in run.events() if isinstance(event.fact, AttemptStarted))
    return run.metrics()[0].at - started


def peer(stack: Stack, folder: Path, options: argparse.Namespace, seed: int) -> list[float]:
    """Optuna, as its tutorial has it; the accuracy of each trial."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data = Path(stack.environment["LONGHAUL_DATA"])

    def objective(asked: optuna.Trial) -> float:
        settings = {
            "learning_rate": asked.suggest_float("learning_rate", *RATES, log=True),
            "batch_size": asked.suggest_categorical("batch_size", SIZES),
            "warmup_ratio": asked.suggest_float("warmup_ratio", *WARMUP),
        }
        given = {**settings, "model": os.fspath(folder), "data": os.fspath(data), "epochs": options.epochs}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "benchmarks.sweep", "trial", json.dumps(given)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return float(json.loads(done.stdout.splitlines()[-1])["accuracy"])

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=options.trials)
    return [float(each.value) for each in study.trials if each.value is not None]


def trial(given: dict[str, Any]) -> int:
    """One trial of the other: a script as users write it."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    read = {
        name: [json.loads(line) for line in (Path(given["data"]) / f"{name}.jsonl").open()]
        for name in ("train", "held_out")
    }
    labels = sorted({row["label"] for rows in read.values() for row in rows})
    encoded = {
        name: [
            {**tokenizer(row["text"], truncation=True, max_length=64), "labels": labels.index(row["label"])}
            for row in rows
        ]
        for name, rows in read.items()
    }
    model = AutoModelForSequenceClassification.from_pretrained(given["model"], dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, num_train_epochs=given["epochs"], per_device_train_batch_size=given["batch_size"],
            per_device_eval_batch_size=64, learning_rate=given["learning_rate"], warmup_steps=given["warmup_ratio"],
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, max_grad_norm=1.0,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=encoded["train"], eval_dataset=encoded["held_out"],
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=accuracy,
        )  # fmt: skip
        trainer.train()
        print(json.dumps({"accuracy": trainer.evaluate()["eval_accuracy"]}))
    return 0


def accuracy(found: Any) -> dict[str, float]:
    """Of the Trainer's `EvalPrediction`."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
