"""How long a job still needs: by its own pace once that was measured, before by its plan. So does `queries.py`."""

from __future__ import annotations

from jobs.metrics import MetricRow
from jobs.plan import CheckSummary
from jobs.record import JobRecord


def present(record: JobRecord, latest: MetricRow | None) -> MetricRow | None:
    """The newest row of metrics, if the attempt that runs wrote it: an earlier one may have come further."""
    return latest if latest is not None and record.attempt_open and latest.attempt == record.attempt else None


def left_s(record: JobRecord, latest: MetricRow | None) -> float | None:
    """Seconds from the newest row of the open attempt on, without one from the newest checkpoint on. None: unknown."""
    if (row := present(record, latest)) is not None:
        return row.eta_s
    if latest is not None and record.steps is not None:
        measured = latest.step < record.steps
        pace = latest.eta_s / (record.steps - latest.step) if measured else latest.step_s
        return pace * (record.steps - record.progress_step)
    time = record.plan.time if isinstance(record.plan, CheckSummary) else None
    hours = time.hours_expected if time else None
    own = record.steps - record.adopted_step if record.steps else 0
    left = 1 - (record.progress_step - record.adopted_step) / own if own > 0 else 1
    return None if hours is None else 3600.0 * hours * left
