"""Made-up records: plans, summaries, events, metrics and heartbeats, as stages and workers would write them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import BaseModel

from jobs.dataset_report import DatasetReport, DatasetSummary, LengthSummary, Percentiles, PreparedSummary, SideLengths
from jobs.disk.files import read_regular, whole_lines
from jobs.disk.rundir import RunDir
from jobs.events import (
    Adopted,
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobCancelRequested,
    JobChecked,
    JobFailed,
    JobPaused,
    JobPauseRequested,
    JobPrepared,
    JobQueued,
    JobSucceeded,
    JobValidated,
)
from jobs.heartbeat import Gpu, WorkerHeartbeat
from jobs.memory_plan import Candidate, MemoryPlan, MemorySummary
from jobs.metrics import MetricRow
from jobs.plan import CheckSummary, DataPlan, ModelPlan, Resolved, TimeSummary, make_plan
from jobs.preview import DataPreview, RowPreview, SourcePreview
from jobs.reasons import Reason
from jobs.record import JobRecord, left_s
from jobs.redis.store import Store
from jobs.text.units import GIB
from jobs.trainer_facts import Fact, Fault

PARTS = {
    "weights": 5 * GIB, "gradients": 5 * GIB, "optimizer": 5 * GIB, "activations": 9 * GIB, "temporaries": GIB,
    "context": GIB,
}  # fmt: skip


def memory_plan(**changes: Any) -> MemoryPlan:
    """8 rows of a large model with adamw_8bit on an RTX 5090, adamw being too large."""
    chosen: dict[str, Any] = {"optimizer": "adamw_8bit", "activation_checkpointing": 0, "micro_batch": 8}
    chosen |= {key: changes[key] for key in chosen.keys() & changes.keys()}
    facts: dict[str, Any] = {
        "device": "cuda",
        "gpu": "NVIDIA GeForce RTX 5090",
        "budget_bytes": 31 * GIB,
        "budget_source": "gpu",
        "margin_bytes": GIB,
        "input_tokens": 256,
        "target_tokens": 256,
        "parts": PARTS,
        "peak_bytes": sum(PARTS.values()),
        "compile": True,
        "candidates": [
            Candidate(**chosen, peak_bytes=sum(PARTS.values()), slowdown=1.05, score=0.9, parts=PARTS),
            Candidate(
                optimizer="adamw",
                activation_checkpointing=0,
                micro_batch=0,
                peak_bytes=43 * GIB,
                slowdown=1.6,
                score=0.6,
            ),
        ],
        "why": "adamw needs more than 43.0 GiB",
        "seconds": 1.0,
    }
    return MemoryPlan(**facts | chosen | changes)


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


def preview(rows: Sequence[RowPreview] = (), *, read_as: str | None = None) -> DataPreview:
    """These rows, of columns `a` and `b`."""
    source = SourcePreview(name="rows.jsonl", weight=1.0, read_as=read_as, input="{a}", target="{b}", rows=[*rows])
    return DataPreview(sources=[source])


def write_plan(run: RunDir, prepared: str | None = None) -> None:
    """The plan of a job with 8 rows, which are in the folder `prepared`."""
    data = DataPlan(train="x", input="x", target="x", rows=8, prepared=prepared)
    run.write_plan(make_plan(run.spec(), ModelPlan(source="x", parameters=1), data))


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


H200 = Gpu(uuid="GPU-1", name="NVIDIA H200", memory_bytes=2**37, driver="580")


def heartbeat(name: str, why: str | None = None, **more: Any) -> WorkerHeartbeat:
    """Of a worker whose name begins with its stage, unless `more` says another."""
    facts: dict[str, Any] = {"name": name, "stage": name.partition("-")[0], "healthy": why is None, "why": why}
    return WorkerHeartbeat(**facts | more)


@contextlib.contextmanager
def beating(store: Store, *roles: str) -> Iterator[None]:
    """While a worker of each role reports itself every few seconds: a minute after the last time Redis forgets it."""
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(5.0):
            report()

    def report() -> None:
        for role in roles:
            store.workers.report(heartbeat(f"{role}-box", stage=role))

    report()
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


FactType = TypeVar("FactType", bound=Fact)


def facts_of(run: RunDir, kind: type[FactType]) -> list[FactType]:
    """Those of one type, in order."""
    return [event.fact for event in run.events() if isinstance(event.fact, kind)]


def reasons(run: RunDir) -> list[Reason]:
    """Why each attempt ended."""
    return [end.reason for end in facts_of(run, AttemptEnded)]
