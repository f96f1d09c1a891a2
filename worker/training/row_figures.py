"""What evaluations found of each row, in the run directory: `evaluations/step-00000500.jsonl`, one line a row.

The first one is what later ones are compared with. A file is complete or absent, and the same evaluation writes the
same bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import EvaluationMetric
from jobs.events import Sample
from worker.training.scores.statistics import Statistics

KEPT = 2
"""Newest files; also kept are the first one, and those of checkpoints."""
_TEXTS = ("input", "target", "generated")
log = logging.getLogger("longhaul.trainer")


def file_of(run: RunDir, step: int) -> Path:
    """Where the rows of an evaluation are."""
    return run.path / "evaluations" / f"step-{step:08d}.jsonl"


def write(run: RunDir, step: int, statistics: Mapping[EvaluationMetric, Statistics], texts: Sequence[Sample]) -> None:
    """Write the rows of an evaluation, and remove the files that are kept no longer. A full disk stops nothing."""
    columns = {_column(metric): found.of_rows for metric, found in statistics.items()}
    lines = []
    for row in range(max(map(len, columns.values()), default=0)):
        line: dict[str, object] = {"row": row}
        line |= {name: column[row] for name, column in columns.items() if row < len(column)}
        if row < len(texts):
            line |= texts[row].model_dump(include=set(_TEXTS))
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    file = file_of(run, step)
    try:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(lines).encode())
        _prune(run, step)
    except OSError as error:
        log.warning("%s is not written, and training continues: %s", file, error)


def before_training(
    run: RunDir, statistics: Mapping[EvaluationMetric, Statistics]
) -> dict[EvaluationMetric, Statistics]:
    """The same metrics of the model before step 1, as far as they are of the same rows."""
    try:
        lines = [json.loads(line) for line in file_of(run, 0).read_bytes().splitlines()]
        columns = {each: [line[_column(each)] for line in lines if _column(each) in line] for each in statistics}
        found = {metric: each.like(columns[metric]) for metric, each in statistics.items() if columns[metric]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read, so nothing is compared with it: %s", file_of(run, 0), error)
        return {}
    return {metric: each for metric, each in found.items() if len(each) == len(statistics[metric])}


def _column(metric: EvaluationMetric) -> str:
    """Perplexity is made of the numbers of the loss."""
    return str(EvaluationMetric.LOSS if metric is EvaluationMetric.PERPLEXITY else metric)


def _prune(run: RunDir, step: int) -> None:
    """Of later steps than this one are what an attempt left that got further, and lost its checkpoints."""
    files = sorted(file_of(run, 0).parent.glob("step-*.jsonl"), reverse=True)
    saved = {folder.name.rpartition("step-")[2] for folder in run.checkpoints.glob("*step-*")}
    until = [file for file in files if file.name <= file_of(run, step).name]
    kept = {*until[:KEPT], file_of(run, 0), *(file_of(run, int(name)) for name in saved if name.isdecimal())}
    for file in files:
        if file not in kept:
            file.unlink()
