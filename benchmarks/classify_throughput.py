"""Rows a second of our loop and of transformers' `Trainer` with a classifier: same rows, weights, dtype, AdamW.

    python -m benchmarks.classify_throughput --data FILE [--seeds 3] [--epochs 2] [--batch-size 32] [--threads 1]

The file is prepared as a job would have it, with `builtin:roberta-tiny`; both begin with the weights that *prepare*
made, in fp32, with one thread each way. The Trainer has what transformers documents as best: sdpa,
`train_sampling_strategy="group_by_length"`, DataCollatorWithPadding to multiples of 8, `adamw_torch_fused`. For each
seed both have a turn of as many epochs, who is first alternates; only training is timed, by wall clock and by CPU time.
Then each tells the labels of all held-out rows: accuracies must agree within two standard errors of their difference,
by the number of rows and the spread over seeds. JSON on the last line; `vs_trainer` is the median over seeds, by CPU
time `cpu_vs_trainer`. Exit code 1 where the accuracies differ.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
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
    TrainingArguments,
)

from benchmarks.corpus import dataset_of, prepared_job
from jobs.plan import Plan
from jobs.spec import TrainingSpec
from worker.training.dataset.data import Rows
from worker.training.loop import accumulate
from worker.training.optimizers.optimizer import make_optimizer
from worker.training.steps.learning_rate import learning_rate
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Task

MICRO_BATCH = 32
Figures = dict[str, float]


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
    options = parse(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        run = prepared_job(
            options.data,
            Path(folder),
            model="builtin:roberta-tiny",
            data={"validation": 0.2, "max_input_tokens": 128},
            training={
                "epochs": options.epochs,
                "batch_size": options.batch_size,
                "learning_rate": options.learning_rate,
            },
        )
        plan, data = run.plan(), dataset_of(run)
        task = task_of(run.spec(), plan.task, plan.data)
        table: dict[str, list[Figures]] = {"ours": [], "trainer": []}
        for seed in range(options.seeds):
            for name in ("ours", "trainer") if seed % 2 == 0 else ("trainer", "ours"):
                model = AutoModelForSequenceClassification.from_pretrained(str(plan.model.folder), dtype=torch.float32)
                began, cpu = time.perf_counter(), time.process_time()
                if name == "ours":
                    began, cpu = ours(model, data.train, task, plan, options, seed)
                else:
                    began, cpu = peer(model, data.train, plan, options, seed, Path(folder))
                seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
                rows = len(data.train) * options.epochs
                figures = {"rows_per_s": rows / seconds, "rows_per_cpu_s": rows / cpu_seconds}
                table[name].append(figures | {"accuracy": accuracy(model, data.validation, task)})
                print(
                    f"seed {seed} {name:8} " + "  ".join(f"{key} {each:.4g}" for key, each in table[name][-1].items())
                )
    result = compared(table, len(data.validation))
    print(
        json.dumps({"benchmark": "classify_throughput", "rows": len(data.train), **vars(options)} | result, default=str)
    )
    return 0 if result["same_accuracy"] else 1


def parse(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="rows with a text and a label")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def ours(
    model: PreTrainedModel, rows: Rows, task: Task, plan: Plan, options: argparse.Namespace, seed: int
) -> tuple[float, float]:
    """Train; returns when it began, by wall clock and CPU time."""
    task.configure(model, fused=True, dropout=None)
    model.train()
    training = TrainingSpec(learning_rate=options.learning_rate, seed=seed)
    optimizer = make_optimizer("adamw", model.named_parameters(), training, fused=True)
    order = StepOrder(task.widths(rows), options.batch_size, options.epochs, seed)
    limit, pad = task.limit(rows, min(MICRO_BATCH, options.batch_size)), int(model.config.pad_token_id or 0)
    began = time.perf_counter(), time.process_time()
    for number in range(1, plan.steps + 1):
        seed_step(seed, number)
        loss = accumulate(model, limit.batches(rows, order.groups_of(number - 1), pad))
        rate = learning_rate(
            number, peak=options.learning_rate, steps=plan.steps, warmup=plan.warmup_steps, lr_scheduler="linear"
        )
        optimizer.step(number, rate, loss)
        model.zero_grad(set_to_none=True)
    return began


def peer(
    model: PreTrainedModel, rows: Rows, plan: Plan, options: argparse.Namespace, seed: int, scratch: Path
) -> tuple[float, float]:
    """The same by transformers' Trainer."""
    tokenizer = AutoTokenizer.from_pretrained(str(plan.model.folder))
    arguments = TrainingArguments(
        output_dir=str(scratch / "trainer"),
        per_device_train_batch_size=min(MICRO_BATCH, options.batch_size),
        gradient_accumulation_steps=max(1, options.batch_size // MICRO_BATCH),
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=plan.warmup_steps,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        num_train_epochs=options.epochs,
        train_sampling_strategy="group_by_length",
        seed=seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=TrainerRows(rows),
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
        processing_class=tokenizer,
    )
    began = time.perf_counter(), time.process_time()
    trainer.train()
    return began


def accuracy(model: PreTrainedModel, rows: Rows, task: Task) -> float:
    """Over all of these rows."""
    model.eval()
    groups = task.widths(rows).groups(np.arange(len(rows)), MICRO_BATCH)
    batches = task.limit(rows, MICRO_BATCH).batches(rows, groups, int(model.config.pad_token_id or 0))
    with torch.no_grad():
        answers = [answer.numpy() for batch in batches if (answer := batch.evaluated(model)[1]) is not None]
    chosen = np.concatenate([batch.rows for batch in batches])
    return task.measured(rows, chosen, np.concatenate(answers)).metrics["accuracy"]


def compared(table: dict[str, list[Figures]], rows: int) -> dict[str, Any]:
    """Ratios, and whether accuracies are the same within noise."""
    found = {name: [each["accuracy"] for each in turns] for name, turns in table.items()}
    means = {name: statistics.fmean(each) for name, each in found.items()}
    middle = statistics.fmean(means.values())
    sampling = 2 * max(middle * (1 - middle), 0.01) / rows
    spread = sum(statistics.variance(each) if len(each) > 1 else 0.0 for each in found.values())
    error = math.sqrt((sampling + spread) / len(found["ours"]))
    difference = means["ours"] - means["trainer"]

    def ratio(key: str) -> float:
        pairs = zip(table["ours"], table["trainer"], strict=True)
        return round(statistics.median(one[key] / other[key] for one, other in pairs), 3)

    return {
        "vs_trainer": ratio("rows_per_s"),
        "cpu_vs_trainer": ratio("rows_per_cpu_s"),
        "accuracy": found,
        "difference": round(difference, 4),
        "same_accuracy": abs(difference) <= 2 * error,
        "turns": table,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
