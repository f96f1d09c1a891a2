"""Rows of metrics.jsonl, for tests of what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from jobs.disk.files import read_regular, whole_lines
from jobs.metrics import MetricRow

Row = TypeVar("Row", bound=BaseModel)


def read_lines(file: Path, kind: type[Row]) -> list[Row]:
    """Every whole line of the file, in its order; a damaged one is an error."""
    return [kind.model_validate_json(line) for line in whole_lines(read_regular(file))]


def metric_row(step: int, **changes: Any) -> MetricRow:
    """Plain figures but for `changes`: the first attempt, a minute left."""
    figures: dict[str, Any] = {
        "at": 1000.5 + step, "attempt": 1, "epoch": 0.5, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.0,
        "rows_per_s": 10.0, "target_tokens_per_s": 100.0, "step_s": 0.1, "eta_s": 60.0, "memory_bytes": 2**20,
        "memory_reserved_bytes": 2**21, "cache_clears": 0, "cache_clear_s": 0.0, "micro_batch": 8,
        "data_wait_fraction": 0.0,
    }  # fmt: skip
    return MetricRow(step=step, **figures | changes)
