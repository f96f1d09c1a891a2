"""What has happened to a job in each state, as facts."""

from __future__ import annotations

import pytest

from jobs.estimate import left_s
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    Fault,
    JobCancelRequested,
    JobFailed,
    JobPaused,
    JobPauseRequested,
    JobQueued,
    JobSucceeded,
    JobValidated,
)
from jobs.metrics import MetricRow
from jobs.record import JobRecord
from tests.summaries import checked, prepared


def stumble_over(monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    """From now on an error that nobody foresaw comes up where the events of this job are told to Redis."""

    def stumbling(record: JobRecord, latest: MetricRow | None) -> float | None:
        if record.id == job:
            raise LookupError("rank")
        return left_s(record, latest)

    monkeypatch.setattr("jobs.redis.store.left_s", stumbling)


QUEUED: list[AnyFact] = [checked(), prepared(10), JobQueued()]
STARTED = AttemptStarted(worker="w", device="cpu")
RUNNING: list[AnyFact] = [*QUEUED, STARTED]
DONE: list[AnyFact] = [*RUNNING, AttemptEnded(reason="done", step=10)]
STATES: dict[str, list[AnyFact]] = {
    "validating": [],
    "queued": QUEUED,
    "running": RUNNING,
    "pausing": [*RUNNING, JobPauseRequested()],
    "cancelling": [*RUNNING, JobCancelRequested()],
    "paused": [*QUEUED, JobPaused()],
    "succeeded": [*DONE, JobSucceeded(model="model", step=10, loss=1.0)],
    "failed": [JobFailed(error=Fault(code="bad_data", message="m", hint="h"))],
    "validated": [checked(), JobValidated()],
}
