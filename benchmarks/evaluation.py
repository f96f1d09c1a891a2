"""Is a figure of an evaluation right, and is "better" said only of what is better?

    python -m benchmarks.evaluation e2e.jsonl.gz banking77.jsonl.gz [--rows 1500] [--generate-rows 64]

Trains the built-in models on the first rows of each file (texts: input, target; classes: text, label), once as usual
and once with a learning rate at which no weight changes, and prints what the jobs say of base and tuned model. Then how
often an interval of 95 % covers the true value, and how often a model that is as good as another is called better or
worse; and what texts take that are written one by one and together. JSON on the last line.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import TICKETS, parse
from jobs.evaluation_metrics import EvaluationMetric
from jobs.text.units import format_duration
from worker.training.scores.statistics import Sums, difference, interval

KEYS = ("jobs", "coverage_20_rows", "coverage_64_rows", "coverage_500_rows", "called_different", "texts")
TRUE_SHARE = 0.3
NOTHING = 1e-30
"""A learning rate by which no weight in bf16 changes."""


def main(argv: list[str]) -> int:
    """Train, simulate, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--generate-rows", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--runs", type=int, default=2000, help="of what is simulated")
    arguments = parse(parser, argv, files=[TICKETS], rows=40, generate_rows=2, epochs=1, runs=20)
    found: dict[str, Any] = {"jobs": {}}
    for file in arguments.files:
        for name, rate in (("tuned", 3e-3), ("learnt nothing", NOTHING)):
            epochs = arguments.epochs if rate != NOTHING else 1
            found["jobs"][f"{file.name.partition('.')[0]}: {name}"] = job(file, rate, epochs, arguments)
    for rows in (20, 64, 500):
        covered = coverage(rows, arguments.runs)
        found[f"coverage_{rows}_rows"] = covered
        print(f"of {rows} rows, an interval covers the true share {covered:.1%} of the time")
    found["called_different"] = called_different(64, arguments.runs)
    print(f"of two models that are equally good, {found['called_different']:.1%} are called better or worse")
    found["texts"] = {together: texts_s(arguments.generate_rows, together) for together in (1, 8, 32)}
    for together, seconds in found["texts"].items():
        print(f"{arguments.generate_rows} texts, {together} at once: {format_duration(seconds)} of one core")
    print(json.dumps(found))
    return 0


def job(file: Path, rate: float, epochs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a whole job says of its model."""
    from benchmarks.corpus import prepared_job
    from worker.training.journal import Journal, StopSignal
    from worker.training.readme import evaluations_of
    from worker.training.settings import TrainerSettings
    from worker.training.train import train

    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(arguments.rows), strict=False)]
    model = "builtin:roberta-tiny" if "label" in rows[0] else "builtin:t5-tiny"
    with tempfile.TemporaryDirectory() as scratch:
        (plain := Path(scratch) / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = prepared_job(
            plain, Path(scratch), model=model, data={"validation": 0.2},
            training={"epochs": epochs, "batch_size": 32, "learning_rate": rate},
            evaluation={"every_steps": 10_000, "samples": 1, "generate_rows": arguments.generate_rows},
        )  # fmt: skip
        settings = TrainerSettings(data=Path(), prepared=Path(), models=Path(), device="cpu", offline=True)
        begun = time.perf_counter()
        assert train(run, settings, Journal(run.attempt_file(1)), StopSignal(), 1) == 0
        seen = evaluations_of(run)
        last = seen[max(seen)]
        assert last.verdict is not None
        print(f"{file.name}, {format_duration(time.perf_counter() - begun)}: {last.verdict.text}")
        return {
            "base": {"loss": seen[0].loss, **seen[0].metrics},
            "tuned": {"loss": last.loss, **last.metrics},
            "intervals": {name: [each.low, each.high] for name, each in last.intervals.items()},
            "against_base": {name: [each.difference, each.low, each.high] for name, each in last.against_base.items()},
            "evaluation_s": round(last.seconds, 2),
            "verdict": last.verdict.outcome,
            "text": last.verdict.text,
        }


def texts_s(count: int, together: int) -> float:
    """Seconds of the processor for so many texts of 48 tokens by a model of FLAN-T5-Small's size, random, in bf16."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    from worker.training.tasks.seq2seq.fused import fuse

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = T5Config(d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu")
    model: Any = T5ForConditionalGeneration(config).eval()
    fuse(model.to(torch.bfloat16))
    ids = torch.randint(3, 32_000, (count, 64))
    begun = time.process_time()
    with torch.no_grad():
        for some in ids.split(together):
            length = {"max_new_tokens": 48, "min_new_tokens": 48}
            mask = torch.ones_like(some)
            model.generate(some, attention_mask=mask, do_sample=False, decoder_start_token_id=0, **length)
    return time.process_time() - begun


def coverage(rows: int, runs: int) -> float:
    """Share of intervals that hold the true value of an accuracy; 0.95 is wanted."""
    draw = np.random.default_rng(0)
    found = [interval(_told(draw.random(rows) < TRUE_SHARE)) for _ in range(runs)]
    return sum(each is not None and each.low <= TRUE_SHARE <= each.high for each in found) / runs


def called_different(rows: int, runs: int) -> float:
    """Share of pairs of equally good models whose interval of the difference leaves out 0; 0.05 is wanted."""
    draw = np.random.default_rng(1)
    pairs = ([_told(draw.random(rows) < TRUE_SHARE) for _ in range(2)] for _ in range(runs))
    found = [difference(one, other) for one, other in pairs]
    return sum(each is not None and (each.low > 0 or each.high < 0) for each in found) / runs


def _told(right: np.ndarray[Any, np.dtype[np.bool_]]) -> Sums:
    return Sums.ratio(EvaluationMetric.ACCURACY, right, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
