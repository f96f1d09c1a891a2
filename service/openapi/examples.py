"""Examples of answers, made as real answers are: a job's events folded, and shown in the shapes of answers."""

from __future__ import annotations

from typing import Any

from jobs import answers
from jobs.dataset_report import LengthSummary, Percentiles, PreparedSummary, SideLengths
from jobs.events import AttemptStarted, Event, JobChecked, JobPrepared, JobQueued, JobSubmitted
from jobs.gpus import REFERENCE
from jobs.memory_plan import Candidate, MemoryPlan
from jobs.metrics import MetricRow
from jobs.plan import CheckSummary, Resolved, make_time_plan
from jobs.record import fold
from jobs.redis.store import StoredJob
from jobs.spec import parse_spec
from jobs.trainer_facts import Fact
from service.answers import EVENT_LIST, JOB, JOB_LIST
from service.answers.conversion import event_answer, job_answer, page

_ID = "job-06e1m8c4f0zt3qk5x9wb"
_AT = 1_763_733_600.25
_SPEC = parse_spec(
    {
        "name": "chef",
        "data": {"train": "recipes.jsonl", "input": "{title}", "target": "{directions}"},
        "metadata": {"team": "kitchen"},
    }
)
_TIME = make_time_plan(
    model_flops=9.9e19, recomputed_flops=0.0, estimated=False, device="cuda", gpu=REFERENCE,
    parameters=2_849_757_184, compiled=True, step_flops=4.2e14,
).summary()  # fmt: skip
_SETTING: dict[str, Any] = {"optimizer": "adamw_8bit", "activation_checkpointing": 0, "micro_batch": 8}
_PARTS = {
    "weights": 5_699_514_368, "gradients": 5_699_514_368, "optimizer": 5_743_000_000, "activations": 9_600_000_000,
    "temporaries": 657_971_264, "context": 500_000_000,
}  # fmt: skip
_MEMORY = MemoryPlan(
    device="cuda", gpu="NVIDIA GeForce RTX 5090", budget_bytes=33_600_000_000, budget_source="gpu",
    margin_bytes=1_073_741_824, input_tokens=256, target_tokens=256, **_SETTING, compile=True, parts=_PARTS,
    peak_bytes=sum(_PARTS.values()),
    candidates=[Candidate(**_SETTING, peak_bytes=sum(_PARTS.values()), slowdown=1.0, score=0.97)],
    why="adamw needs more than 33.6 GB", seconds=9.5,
).summary()  # fmt: skip
_PLAN = CheckSummary(
    model="google/flan-t5-xl (commit 7d6315df2c2fb742f0f5b556879d730926ca9001)", parameters=2_849_757_184,
    train="recipes.jsonl", rows_looked_at=10_000, rows_estimated=2_200_000, invalid_rows={"empty target": 3},
    duplicates=12, input="{title}", target="{directions}", steps=85_938, resolved=Resolved(**_SETTING, compile=True),
    time=_TIME, memory=_MEMORY,
)  # fmt: skip
_LENGTHS = LengthSummary(
    limit=256, before=Percentiles(p50=96, p90=188, p95=231, p99=342, max=911),
    after=Percentiles(p50=96, p90=188, p95=231, p99=256, max=256),
)  # fmt: skip
_DATA = PreparedSummary(
    rows_read=2_202_640, kept=2_202_000, rejected={"empty target": 610}, duplicates=30, train_rows=2_180_000,
    validation_rows=22_000, validation_asked=0.01, validation_share=0.009991, validation_inputs_in_training=4,
    truncated_inputs=61_200, truncated_targets=70_400, input_tokens=228_000_000, target_tokens=231_000_000,
    unknown_inputs=610, unknown_targets=301,
    unknown_tokens=918, unknown_token_rate=2e-06, unknown_characters={"☕": 918}, normalized={"½": 141_000},
    noticed={}, rewritten={"characters rewritten": 130_200}, lengths=SideLengths(input=_LENGTHS, target=_LENGTHS),
    prepared="/var/lib/longhaul/prepared/273defc131c5452bff6b43b6",
)  # fmt: skip
_FACTS: list[tuple[float, int, Fact]] = [
    (0.0, 0, JobSubmitted(name=_SPEC.name, model=_SPEC.model, spec_sha256=_SPEC.sha256(), metadata=_SPEC.metadata)),
    (4.5, 0, JobChecked(plan=_PLAN)),
    (310.0, 0, JobPrepared(data=_DATA, steps=85_157, time=_TIME, memory=_MEMORY)),
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
    stored = StoredJob(record=fold(_ID, events), spec=_SPEC, position=None, latest=_ROW)
    job = job_answer(stored, runs_name="runs")
    events_shown = page(answers.EventList, [event_answer(event) for event in events], has_more=True, by="number")
    return {
        "Job": JOB.dump_python(job, mode="json"),
        "JobList": JOB_LIST.dump_python(page(answers.JobList, [job], has_more=False, by="id"), mode="json"),
        "EventList": EVENT_LIST.dump_python(EVENT_LIST.validate_python(events_shown), mode="json"),
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
            "last_seen_at": _AT + 90_001,
            "heartbeat_age_s": 2.5,
        },
    }
