"""How jobs, events and lists are answered: OpenAI's fine-tuning shapes where they exist, and ours beside them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, cast

from prometheus_client import Counter

from jobs.answers import Hyperparameters, Job, JobActivity, JobGpu, JobList, Page, Progress, ShownEvent
from jobs.attempt import PHASE_WORDS, Activity
from jobs.events import Event
from jobs.metrics import MetricRow
from jobs.record import JobRecord, left_s, present
from jobs.redis.store import RawJob, StoredJob
from jobs.state import DAMAGED, Requested, Status
from service.answers import JOB, JOB_LIST

log = logging.getLogger("longhaul.service")
UNWORDED = Counter(
    "longhaul_events_unworded", "Events shown as raw JSON because they could not be worded.", registry=None
)


def sentence(event: Event) -> str:
    """What happened, in plain words, with the figures that matter; an event without words for it as it is."""
    try:
        return event.sentence
    except Exception:  # a mistake of ours: nobody who follows may be cut off by it
        log.exception("job %s: event %d cannot be worded and is shown as raw JSON", event.job, event.number)
        UNWORDED.inc()
        return f"{event.type} {event.fact.model_dump_json(exclude={'type'})}"


List = TypeVar("List", bound=Page)


def job_answer(job: StoredJob, *, runs_name: str) -> Job:
    """One job: what its record has by the same names, and what is computed. Paths begin with the name of the runs
    folder. Times: Unix seconds, whole where OpenAI's are. Raises ValidationError where that is no `Job`."""
    record, spec = job.record, job.spec
    folder = f"{runs_name}/{record.id}"
    shown = {name: value for name, value in record if name in Job.__annotations__}
    shown |= {
        "object": "fine_tuning.job",
        "created_at": int(record.submitted_at),
        "finished_at": _whole(record.finished_at),
        "estimated_finish": None if job.damage else _whole(job.estimated_finish) or _estimated_finish(job),
        "status": DAMAGED if job.damage else record.status.value,
        "fine_tuned_model": f"{folder}/{record.result_model}" if record.result_model else None,
        "error": job.damage or record.error,
        "hyperparameters": Hyperparameters(
            n_epochs=spec.training.epochs if spec else None,
            batch_size=spec.training.batch_size if spec else None,
            learning_rate=spec.training.learning_rate if spec else None,
        ),
        "seed": spec.training.seed if spec else None,
        "training_file": ", ".join(each.source for each in spec.data.sources) if spec else None,
        "validation_file": spec.data.validation_name if spec else None,
        "method": spec.method if spec else None,
        "organization_id": "longhaul",
        "result_files": [record.result_model, "metrics.jsonl"] if record.result_model else [],
        "trained_tokens": None,
        "queue_position": None if job.position is None else job.position + 1,
        "estimated_start": _whole(job.estimated_start),
        "not_before": record.not_before or None,
        "waiting_reason": job.waits_because,
        "engine": record.engine or job.gpu_needs.engine,
        "gpus": _gpus(job),
        "started_at": _whole(record.started_at),
        "progress": _progress(record, job.latest),
        "activity": _activity(job.activity),
        "final_loss": record.result_loss,
        "chosen_by": record.result_chosen_by,
        "better_step": record.result_better_step,
        "kept_from": record.result_kept_from,
        "final_metrics": record.result_metrics,
        "final_intervals": record.result_intervals,
        "run_dir": folder,
        "event_number": record.number,
        "spec": spec,
    }
    return JOB.validate_python(shown)


def job_json(job: StoredJob | RawJob, *, runs_name: str) -> bytes:
    """`job_answer` as JSON. Raises as that."""
    if isinstance(job, RawJob):
        return _raw_job_json(job, runs_name)
    return JOB.dump_json(job_answer(job, runs_name=runs_name))


@lru_cache(maxsize=1024)  # usually 6 KiB each, with the key; 100 KiB with the largest metadata
def _raw_job_json(job: RawJob, runs_name: str) -> bytes:
    """Jobs are asked for again and again. The key is all that an answer is made of, so none is ever out of date."""
    return job_json(job.parsed(), runs_name=runs_name)


def job_list_json(jobs: Sequence[RawJob], *, runs_name: str, has_more: bool) -> bytes:
    """A `JobList` as JSON, with each job by `job_json`."""
    first, last = (jobs[0].id, jobs[-1].id) if jobs else (None, None)
    empty = JOB_LIST.dump_json(JobList(object="list", data=[], has_more=has_more, first_id=first, last_id=last))
    data = b",".join(job_json(job, runs_name=runs_name) for job in jobs)
    return empty.replace(b'"data":[]', b'"data":[%b]' % data, 1)


def event_answer(event: Event) -> ShownEvent:
    """One event; `data` is the fact, `message` the same for people."""
    return ShownEvent(
        object="fine_tuning.job.event",
        id=f"{event.job}:{event.number}",
        number=event.number,
        job=event.job,
        created_at=int(event.at),
        at=event.at,
        attempt=event.attempt,
        level=event.fact.level,
        message=sentence(event),
        type=event.type,
        data={name: value for name, value in event.fact if name != "type"},
    )


def unread_event(job: str, number: int, raw: bytes) -> dict[str, object]:
    """An event that this version cannot read, as far as it looks like one; `message` is all that Redis holds of it."""
    envelope: Any = {}
    with suppress(ValueError):
        envelope = json.loads(raw)
    envelope = envelope if isinstance(envelope, dict) else {}
    fact = envelope["fact"] if isinstance(envelope.get("fact"), dict) else {}
    at, attempt = envelope.get("at"), envelope.get("attempt")
    at = at if isinstance(at, float | int) and math.isfinite(at) else 0.0
    kind = str(fact.get("type"))
    return {
        "object": "fine_tuning.job.event",
        "id": f"{job}:{number}",
        "number": number,
        "job": job,
        "created_at": int(at),
        "at": at,
        "attempt": attempt if isinstance(attempt, int) else 0,
        "type": kind if kind.isprintable() else "unknown",
        "level": "warn",
        "message": f"this version cannot read the event: {raw.decode(errors='replace')}",
        "data": {key: value for key, value in fact.items() if key != "type"},
    }


def page(kind: type[List], data: Sequence[Mapping[str, Any]], *, has_more: bool, by: str | None = None) -> List:
    """A list of this kind. `by`: the field of an item that the next page's `after` takes; None: there is one page."""
    first, last = (data[0], data[-1]) if data else ({}, {})
    ends = {} if by is None else {"first_id": first.get(by), "last_id": last.get(by)}
    return cast(List, {"object": "list", "has_more": has_more, "data": data, **ends})


def _gpus(job: StoredJob) -> list[JobGpu]:
    """Those of the job's engine, or of our own machines. The places of an engine are alike: one stands for all."""
    needs = job.gpu_needs
    trainers = [each for each in job.trainers if each.engine == needs.engine]
    reported = {each.engine or each.gpu.uuid: each.gpu for each in trainers if each.gpu is not None}
    return [
        JobGpu(
            uuid=gpu.uuid,
            name=gpu.text(),
            memory_bytes=gpu.memory_bytes,
            can_take=(why := needs.unmet(gpu.facts)) is None,
            why=why,
        )
        for _, gpu in sorted(reported.items())
    ]


def _activity(heard: Activity | None) -> JobActivity | None:
    if heard is None:
        return None
    return {
        "phase": heard.phase, "words": PHASE_WORDS[heard.phase], "since": heard.since, "fraction": heard.fraction,
    }  # fmt: skip


def _progress(record: JobRecord, latest: MetricRow | None) -> Progress:
    running = record.status is Status.RUNNING
    row = present(record, latest) if running else latest
    step = row.step if row and (running or record.status.terminal) else record.progress_step
    if record.result_step is not None:
        step = record.result_step if record.steps is None else record.steps
    eta_s = left_s(record, latest) if running else None
    return Progress(
        step=step,
        steps=record.steps,
        fraction=round(min(1.0, step / record.steps), 4) if record.steps else None,
        epoch=row.epoch if row else None,
        loss=row.loss if row else None,
        rows_per_s=row.rows_per_s if row else None,
        tokens_per_s=row.tokens_per_s if row else None,
        mfu=row.mfu if row else None,
        memory_bytes=row.memory_bytes if row else None,
        eta_s=eta_s,
        eta_from=None if eta_s is None else "measured" if latest else "plan",
        at=row.at if row else None,
    )


def _estimated_finish(job: StoredJob) -> int | None:
    """Of a running job; what waits is estimated with the order, in `jobs/redis/queries.py`."""
    record, left = job.record, left_s(job.record, job.latest)
    if record.status is not Status.RUNNING or left is None or record.requested is not Requested.NONE:
        return None
    row = present(record, job.latest)
    since = row.at if row else record.attempt_started_at
    return None if since is None else int(since + left)


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
