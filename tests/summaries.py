"""What check and prepare found, as their events tell it, for tests of what is made of that."""

from __future__ import annotations

from typing import Any

from jobs.dataset_report import DatasetReport, DatasetSummary, LengthSummary, Percentiles, PreparedSummary, SideLengths
from jobs.events import Adopted, JobChecked, JobPrepared
from jobs.memory_plan import MemorySummary
from jobs.plan import CheckSummary, Resolved, TimeSummary
from tests.memory_plans import memory_plan

_EACH = Percentiles(p50=9, p90=9, p95=9, p99=9, max=9)
_SIDE = LengthSummary(limit=256, before=_EACH, after=_EACH)
_DATASET: dict[str, Any] = {
    "rows_read": 8, "kept": 8, "rejected": {}, "duplicates": 0, "train_rows": 8, "validation_rows": 0,
    "validation_asked": 0.0, "validation_share": 0.0, "validation_inputs_in_training": 0, "truncated_inputs": 0,
    "truncated_targets": 0, "input_tokens": 72, "target_tokens": 72, "unknown_tokens": 0, "unknown_token_rate": 0.0,
    "unknown_characters": {}, "normalized": {}, "noticed": {}, "rewritten": {},
    "lengths": SideLengths(input=_SIDE, target=_SIDE),
}  # fmt: skip


def time_summary(**changes: Any) -> TimeSummary:
    """On a CPU, unless the changes name a GPU."""
    facts: dict[str, Any] = {
        "model_flops": 1.0, "recomputed_flops": 0.0, "estimated": False, "gpu": None, "hours_at_limit": None,
        "hours_expected": None, "text": None,
    }  # fmt: skip
    return TimeSummary(**facts | changes)


def check_summary(**changes: Any) -> CheckSummary:
    """8 rows, 9 steps, time unknown."""
    facts: dict[str, Any] = {
        "model": "builtin:t5-tiny", "parameters": 10, "train": "rows.jsonl", "rows_looked_at": 8, "rows_estimated": 8,
        "invalid_rows": {}, "duplicates": 0, "input": "{title}", "target": "{directions}", "steps": 9,
        "resolved": Resolved(micro_batch=8, activation_checkpointing=0), "time": None,
        "memory": memory_plan().summary(),
    }  # fmt: skip
    return CheckSummary(**facts | changes)


def checked(**changes: Any) -> JobChecked:
    """The event with this summary."""
    return JobChecked(plan=check_summary(**changes))


def dataset_summary(**changes: Any) -> DatasetSummary:
    """8 rows, all of them to learn from."""
    return DatasetSummary(**_DATASET | changes)


def dataset_report(**changes: Any) -> DatasetReport:
    """dataset.json of those rows, from no source."""
    return DatasetReport(**_DATASET | {"sources": []} | changes)


def prepared(
    steps: int = 10,
    *,
    time: TimeSummary | None = None,
    memory: MemorySummary | None = None,
    adopted: Adopted | None = None,
    **data: Any,
) -> JobPrepared:
    """The event, with these changes to what was found in 8 rows."""
    found = PreparedSummary(**_DATASET | {"prepared": "/prepared/1"} | data)
    return JobPrepared(data=found, steps=steps, time=time, memory=memory, adopted=adopted)
