"""Examples of answers, made as real answers are: a job's events folded, and shown in the shapes of answers."""

from __future__ import annotations

from typing import Any

from jobs.events import AttemptStarted, Event, Fact, JobChecked, JobPrepared, JobQueued, JobSubmitted
from jobs.metrics import MetricRow
from jobs.record import fold
from jobs.spec import parse_spec
from jobs.store import StoredJob
from service.shapes import event_json, job_json, list_json

_ID = "job-06e1m8c4f0zt3qk5x9wb"
_AT = 1_763_733_600.25
_SPEC = parse_spec(
    {
        "name": "chef",
        "data": {"train": "recipes.jsonl", "input": "{title}", "target": "{directions}"},
        "metadata": {"team": "kitchen"},
    }
)
_FACTS: list[tuple[float, int, Fact]] = [
    (0.0, 0, JobSubmitted(name=_SPEC.name, model=_SPEC.model, spec_sha256=_SPEC.sha256(), metadata=_SPEC.metadata)),
    (4.5, 0, JobChecked(plan={"rows_estimated": 2_200_000, "steps": 85_938, "parameters": 2_849_757_184})),
    (310.0, 0, JobPrepared(data={"train_rows": 2_180_000, "validation_rows": 22_000}, steps=85_157)),
    (310.1, 0, JobQueued()),
    (312.0, 1, AttemptStarted(worker="train-box-41-a1b2c3", device="cuda")),
]
_ROW = MetricRow(
    step=4200, at=_AT + 90_000, attempt=1, epoch=0.2466, loss=1.4171, learning_rate=9.9e-5, grad_norm=0.83,
    rows_per_s=11.9, target_tokens_per_s=1_420.0, tokens_per_s=2_510.0, padding_fraction=0.041, mfu=0.41, step_s=10.7,
    eta_s=866_000.0, memory_bytes=27_900_000_000, memory_reserved_bytes=29_100_000_000, cache_clears=84,
    cache_clear_s=1.9, micro_batch=8, data_wait_fraction=0.001,
)  # fmt: skip


def by_schema() -> dict[str, Any]:
    """An example for each of these schemas of the document."""
    events = [
        Event.model_validate({"number": number, "job": _ID, "at": _AT + after, "attempt": attempt, "fact": fact})
        for number, (after, attempt, fact) in enumerate(_FACTS, start=1)
    ]
    stored = StoredJob(record=fold(_ID, events), spec=_SPEC.model_dump(mode="json"), position=None, latest=_ROW)
    job = job_json(stored, runs_name="runs")
    shown = [event_json(event) for event in events]
    return {
        "Job": job,
        "JobList": list_json([job], has_more=False, cursor="id"),
        "EventList": list_json(shown, has_more=True, cursor="number"),
        "MetricRow": _ROW.model_dump(mode="json"),
        "Checkpoint": {
            "object": "fine_tuning.job.checkpoint",
            "id": f"{_ID}/step-00004000",
            "created_at": int(_AT) + 86_000,
            "fine_tuning_job_id": _ID,
            "fine_tuned_model_checkpoint": f"runs/{_ID}/checkpoints/step-00004000",
            "step_number": 4000,
            "metrics": {"step": 4000, "valid_loss": 1.3982},
            "bytes": 45_600_000_000,
            "best": True,
            "path": "checkpoints/step-00004000",
        },
        "RunFile": {
            "object": "file",
            "path": "model/config.json",
            "bytes": 1530,
            "modified_at": _AT + 900_000,
        },
        "Dataset": {
            "object": "dataset",
            "name": "recipes.jsonl",
            "uri": "dataset:recipes.jsonl",
            "format": "jsonl",
            "bytes": 2_210_000_000,
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "created_at": int(_AT) - 600,
        },
        "Worker": {
            "name": "train-box-41-a1b2c3",
            "pid": 41,
            "stage": "train",
            "healthy": True,
            "why": None,
            "busy": True,
            "device": "cuda",
            "gpu": {
                "uuid": "GPU-3c1f7f0e-0000-0000-0000-000000000000",
                "name": "NVIDIA GeForce RTX 5090",
                "memory_bytes": 34_190_917_632,
                "driver": "580.95.05",
            },
            "versions": {"torch": "2.13.0", "transformers": "5.0.0", "rq": "2.6.0", "redis": "7.0.1"},
            "job": _ID,
            "job_since": int(_AT) + 312,
            "heard_at": _AT + 90_001,
            "heartbeat_age_s": 2.5,
        },
    }
