"""How jobs, events and lists look in answers: OpenAI's fine-tuning shapes where they exist, and ours beside them."""

from __future__ import annotations

import json
from typing import Any

from jobs.events import Event
from jobs.metrics import MetricRow
from jobs.record import JobRecord
from jobs.state import Request, Status
from jobs.store import StoredJob
from service.wording import level, sentence


def job_json(job: StoredJob, *, runs_name: str) -> dict[str, Any]:
    """One job. Paths begin with the name of the runs folder. Times: Unix seconds, whole where OpenAI's are."""
    record, spec = job.record, job.spec
    data, schedule = spec.get("data", {}), spec.get("schedule", {})
    validation = data.get("validation")
    folder = f"{runs_name}/{record.id}"
    error = record.error
    return {
        # OpenAI's names
        "object": "fine_tuning.job",
        "id": record.id,
        "created_at": int(record.submitted_at),
        "finished_at": _whole(record.finished_at),
        "estimated_finish": _whole(job.estimated_finish) or _estimated_finish(job),
        "status": record.status.value,
        "model": record.model,
        "fine_tuned_model": f"{folder}/{record.result_model}" if record.result_model else None,
        "error": error.model_dump() if error else None,
        "hyperparameters": {
            "n_epochs": schedule.get("epochs"),
            "batch_size": schedule.get("batch_size"),
            "learning_rate": schedule.get("learning_rate"),
        },
        "seed": schedule.get("seed"),
        "training_file": data.get("train"),
        "validation_file": validation if isinstance(validation, str) else None,
        "method": spec.get("method"),
        "metadata": record.metadata,
        "organization_id": "longhaul",
        "result_files": [record.result_model, "metrics.jsonl"] if record.result_model else [],
        "trained_tokens": None,
        # ours
        "name": record.name,
        "stage": record.stage.value,
        "request": record.request.value,
        "priority": record.priority,
        "position": job.position,
        "estimated_start": _whole(job.estimated_start),
        "dry_run": record.dry_run,
        "cloned_from": record.cloned_from,
        "attempt": record.attempt,
        "restarts": record.restarts,
        "last_reason": record.last_reason,
        "not_before": record.not_before or None,
        "waiting": record.waiting,
        "started_at": _whole(record.started_at),
        "training_s": record.training_s,
        "steps": record.steps,
        "progress": _progress(record, job.latest),
        "first_loss": record.first_loss,
        "best_loss": record.best_loss,
        "final_loss": record.result_loss,
        "checkpoint": record.checkpoint,
        "plan": record.plan,
        "data": record.data,
        "run_dir": folder,
        "event_number": record.number,
        "spec": spec,
    }


def event_json(event: Event) -> dict[str, Any]:
    """One event; `data` is the fact, `message` the same for people."""
    fact = json.loads(event.fact.model_dump_json(exclude={"type"}))
    return {
        "object": "fine_tuning.job.event",
        "id": f"{event.job}:{event.number}",
        "number": event.number,
        "job": event.job,
        "created_at": int(event.at),
        "at": event.at,
        "attempt": event.attempt,
        "type": event.type,
        "level": level(event),
        "message": sentence(event),
        "data": fact,
    }


def list_json(data: list[dict[str, Any]], *, has_more: bool, cursor: str | None = None) -> dict[str, Any]:
    """A page. `cursor` is the key of an item that the next page's `after` takes."""
    page: dict[str, Any] = {"object": "list", "data": data, "has_more": has_more}
    if cursor is not None:
        page["first_id"] = data[0][cursor] if data else None
        page["last_id"] = data[-1][cursor] if data else None
    return page


def _progress(record: JobRecord, latest: MetricRow | None) -> dict[str, Any]:
    step = latest.step if latest else 0
    if record.result_step is not None:
        step = record.result_step if record.steps is None else record.steps
    return {
        "step": step,
        "steps": record.steps,
        "fraction": round(min(1.0, step / record.steps), 4) if record.steps else None,
        "epoch": latest.epoch if latest else None,
        "loss": latest.loss if latest else None,
        "rows_per_s": latest.rows_per_s if latest else None,
        "tokens_per_s": latest.tokens_per_s if latest else None,
        "mfu": latest.mfu if latest else None,
        "memory_bytes": latest.memory_bytes if latest else None,
        "eta_s": _eta_s(record, latest),
        "eta_from": None if _eta_s(record, latest) is None else "measured" if latest else "plan",
        "at": latest.at if latest else None,
    }


def _eta_s(record: JobRecord, latest: MetricRow | None) -> float | None:
    """Seconds left of a running job, from its newest row of metrics on; before the first as the plan expects them."""
    if record.status is not Status.RUNNING:
        return None
    if latest is not None:
        return latest.eta_s
    hours = (record.plan.get("time") or {}).get("hours_expected")
    return None if hours is None else 3600.0 * hours


def _estimated_finish(job: StoredJob) -> int | None:
    """Of a running job; what waits is estimated with the order, in `jobs/queries.py`."""
    record, left = job.record, _eta_s(job.record, job.latest)
    if left is None or record.request is not Request.NONE:
        return None
    since = job.latest.at if job.latest else record.attempt_started_at
    return None if since is None else int(since + left)


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
