"""What evaluations found of each row, in the run directory: `evaluations/step-00000500.jsonl`, one line a row.

The first one is what later ones are compared with. A file is complete or absent, and the same evaluation writes the
same bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import EvaluationMetric
from jobs.trainer_facts import Sample
from worker.training.scores.statistics import Statistics

KEPT = 2
"""Newest files; also kept are the first one, and those of checkpoints."""
_TEXTS = ("input", "target", "generated")
log = logging.getLogger("longhaul.trainer")


def file_of(run: RunDir, step: int) -> Path:
    """Where the rows of an evaluation are."""
    return run.path / "evaluations" / f"step-{step:08d}.jsonl"


def write(
    run: RunDir,
    step: int,
    statistics: Mapping[EvaluationMetric, Statistics],
    rows: Sequence[int],
    texts: Mapping[int, Sample],
) -> None:
    """Write the rows of an evaluation, and remove the files that are kept no longer. A full disk stops nothing.

    `rows`: the numbers of those looked at, `texts`: by number those of scored texts, each in the order of `statistics`.
    """
    lines: dict[int, dict[str, object]] = {row: {"row": row} for row in rows}
    for metric, found in statistics.items():
        for row, numbers in zip(texts if metric.of_texts else rows, found.of_rows, strict=True):
            lines[row][_column(metric)] = numbers
    for row, text in texts.items():
        lines[row] |= text.model_dump(include=set(_TEXTS))
    file = file_of(run, step)
    try:
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values()).encode())
        _prune(run, step)
    except OSError as error:
        log.warning("%s is not written, and training continues: %s", file, error)


def before_training(
    run: RunDir,
    statistics: Mapping[EvaluationMetric, Statistics],
    rows: Sequence[int],
    texts: Collection[int],
) -> dict[EvaluationMetric, Statistics]:
    """The same metrics of the model before step 1, as far as they are of the same rows; `rows` and `texts` as above."""
    found = {}
    try:
        lines = [json.loads(line) for line in file_of(run, 0).read_bytes().splitlines()]
        for metric, each in statistics.items():
            column = {line["row"]: line[name] for line in lines if (name := _column(metric)) in line}
            if list(column) == list(texts if metric.of_texts else rows):
                found[metric] = each.like(list(column.values()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read, so nothing is compared with it: %s", file_of(run, 0), error)
        return {}
    return found


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
