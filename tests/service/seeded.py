"""One job in every state, with everything that jobs leave behind: as workers make them, by appending events."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobQueued,
    JobResumed,
    JobSucceeded,
    JobValidated,
)
from jobs.heartbeat import WorkerHeartbeat
from jobs.memory_plan import PICTURE
from jobs.metrics import MetricRow
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.redis.connection import Tickets, connect
from jobs.redis.store import make_id, make_job, submitted_of
from jobs.sweeps.directory import find
from jobs.sweeps.events import SweepEnded, SweepFact, TrialEnded, TrialPruned, TrialStarted
from jobs.sweeps.space import Settings, Value
from jobs.trainer_facts import (
    CheckpointRejected,
    CheckpointSaved,
    DeviceWaiting,
    DiskLow,
    EvaluationFinished,
    Fault,
    GpuProcess,
    MemoryMeasured,
    MemoryPlanned,
    ModelLoaded,
    OomRecovered,
    Sample,
)
from tests.service.running import Service
from tests.support.samples import checked, memory_plan, prepared, preview, time_summary

STARTED = AttemptStarted(worker="train-box-1-a1b2c3", device="cuda")
TRAINED: list[AnyFact] = [
    DeviceWaiting(message="another trainer holds the GPU"),
    ModelLoaded(parameters=10, parameter_bytes=20, dtype="bfloat16", device="cuda:0", seconds=1.5, peak_ratio=1.01),
    MemoryPlanned(
        micro_batch=8, activation_checkpointing=0, optimizer="adamw", peak_bytes=10, budget_bytes=20,
        other_processes_bytes=5, other_processes=[GpuProcess(pid=7, name="python", memory_bytes=5)],
    ),
    MemoryMeasured(step=1, measured_bytes=9, predicted_bytes=10, peak_bytes=10, budget_bytes=20),
    EvaluationFinished(
        step=0, loss=3.5, rows=12, seconds=0.5, best=True, samples=[Sample(input="a", target="b", generated="c")]
    ),
    CheckpointRejected(path="checkpoints/step-00000005", message="manifest.json is missing or damaged"),
    DiskLow(step=7, free_bytes=1, needed_bytes=2),
    OomRecovered(step=8, micro_batch_before=8, micro_batch_after=4, message="out of memory", milliseconds_lost=120.0),
    CheckpointSaved(step=10, path="checkpoints/step-00000010", bytes=600, seconds=0.1, validation_loss=2.5),
]  # fmt: skip


WORKERS: list[dict[str, Any]] = [
    {"name": "train-box-1-a1b2c3", "pid": 1, "stage": "train", "healthy": True, "why": None, "busy": True,
     "queue": "longhaul:train", "device": "cuda", "versions": {"torch": "2.13.0"},
     "gpu": {"uuid": "GPU-1", "name": "NVIDIA GeForce RTX 5090", "memory_bytes": 2**35, "driver": "580.95.05"}},
    {"name": "publish-box-2-d4e5f6", "pid": 2, "stage": "publish", "healthy": False, "why": "the disk is full",
     "busy": False, "queue": None, "device": "cpu", "gpu": None, "versions": {},
     "sinks": {"discord": {"jobs_behind": 1, "oldest_s": 2.5}}},
]  # fmt: skip


def seed(service: Service) -> dict[str, str]:
    """Ids by state; beside the eight states `prepared`, `stopping` (a running job that is to pause), `waiting` (after a
    crash) and `uploaded` (its rows are a data set of the service). `succeeded` has files of every kind and an event of
    every type but the other endings.
    """
    jobs = {
        name: service.submit(name=name, metadata={"team": "kitchen", "state": name})
        for name in ("validating", "prepared", "queued", "waiting", "paused", "running", "stopping", "failed",
                     "cancelled", "succeeded")
    }  # fmt: skip
    for name in ("rows.jsonl", "more.csv", "unused.jsonl"):
        service.request("PUT", f"/datasets/{name}", data=name.encode())
    jobs["uploaded"] = service.submit(data={"train": "dataset:rows.jsonl"})
    (service.run(jobs["uploaded"]).path / "dataset.json").write_text('{"rows_read": 64}')
    for worker in WORKERS:
        service.store.workers.report(WorkerHeartbeat(**worker))
    jobs["validated"] = service.post("/jobs?dry_run=true", json={"data": {"train": "rows.jsonl"}}).json()["id"]
    crash = AttemptEnded(reason="crash", step=3, exit_code=1, error=Fault(code="crash", message="it is gone"))
    train(service, jobs["prepared"], queued=False)
    for name in ("queued", "waiting", "paused", "running", "stopping", "succeeded"):
        train(service, jobs[name])
    service.append(jobs["waiting"], STARTED)
    service.append(jobs["waiting"], crash, JobQueued(not_before_s=600.0))
    service.append(jobs["paused"], JobPaused())
    service.append(jobs["running"], STARTED)
    service.append(jobs["running"], *TRAINED)
    leave_behind(service.run(jobs["running"]))
    service.store.set_latest(jobs["running"], row(10))
    service.append(jobs["stopping"], STARTED)
    service.post(f"/jobs/{jobs['stopping']}/pause")
    hint = "put the file into the data directory"
    service.append(jobs["failed"], JobFailed(error=Fault(code="no_data", message="there is no rows.jsonl", hint=hint)))
    service.append(jobs["cancelled"], JobCancelled())
    service.append(jobs["validated"], JobValidated())
    _succeed(service, jobs["succeeded"])
    return jobs


def seed_sweep(service: Service, *, ended: bool) -> str:
    """A sweep with a trial that succeeded, one that failed, one that was pruned; and one that runs, or its end."""
    job = {"data": {"train": "rows.jsonl"}}
    space = {"training.learning_rate": {"range": [1e-5, 1e-3], "log": True}, "training.batch_size": [16, 32]}
    answer = service.post("/sweeps", json={"job": job, "space": space})
    assert answer.status_code == 202, answer.text
    sweep = find(service.settings.runs, answer.json()["id"])
    facts: list[SweepFact] = []
    for number in range(4):
        settings = {"training.learning_rate": 1e-4 * (number + 1), "training.batch_size": 16}
        facts.append(TrialStarted(trial=number, settings=settings, jobs=[f"job-{sweep.id[6:]}-{number}"]))
    service.run(f"job-{sweep.id[6:]}-0").model.mkdir(parents=True)
    facts += [
        TrialEnded(trial=0, outcome="succeeded", value=1.5, values=[1.5], seconds=9.0),
        TrialEnded(trial=1, outcome="failed", seconds=1.0, error=Fault(code="out_of_memory", message="no room")),
        TrialPruned(trial=2, step=10, value=2.5, message="worse than the median of 5 others at evaluation 1"),
        TrialEnded(trial=2, outcome="pruned", seconds=3.0),
    ]
    if ended:
        facts += [TrialEnded(trial=3, outcome="cancelled"), SweepEnded(reason="done", best=0)]
    sweep.append(facts)
    return sweep.id


def start_trial(service: Service, sweep: str, number: int, **more: Value) -> str:
    """What publish does for the next trial; returns its job."""
    found = find(service.settings.runs, sweep)
    settings: Settings = {"training.learning_rate": 1e-4, "training.batch_size": 16, **more}
    job, spec = make_id(), found.spec().trial(settings, number)
    found.append([TrialStarted(trial=number, settings=settings, jobs=[job])])
    tickets = Tickets(connect(service.settings.redis_url))
    make_job(service.settings.runs, service.store, tickets, job, spec, submitted_of(spec, sweep=sweep))
    return job


def train(service: Service, job: str, *, queued: bool = True) -> None:
    """Checked, prepared and, if wanted, queued."""
    run = service.run(job)
    memory = memory_plan()
    service.append(job, checked(rows_estimated=64, steps=20, memory=memory.summary()))
    data = DataPlan(train="rows.jsonl", input="{title}", target="{directions}", rows=64)
    run.write_preview(preview())
    run.write_plan(make_plan(run.spec(), ModelPlan(source="builtin:t5-tiny", parameters=10), data, "cuda", memory))
    (run.path / PICTURE).write_bytes(b"\x89PNG")
    service.append(job, prepared(20, train_rows=64, time=time_summary(hours_expected=0.5, text="30 min")))
    if queued:
        service.append(job, JobQueued())


def _succeed(service: Service, job: str) -> None:
    """With an interruption on the way, and files of every kind."""
    service.append(job, STARTED)
    service.append(job, *TRAINED)
    service.post(f"/jobs/{job}/pause")
    service.append(job, AttemptEnded(reason="interrupted", step=10), JobPaused())
    service.append(job, JobResumed())
    service.append(job, STARTED)
    leave_behind(service.run(job))
    service.append(job, AttemptEnded(reason="done", step=20), JobSucceeded(model="model", step=20, loss=2.0))


def leave_behind(run: RunDir) -> None:
    """Metrics, a log, two checkpoints, a model, and some names that are hard to handle."""
    for step in range(2, 22, 2):
        append_line(run.metrics_file, row(step))
    run.trainer_log.write_text("".join(f"step {step}: all is well ½\n" for step in range(1000)))
    for step in (10, 20):
        _checkpoint(run.checkpoints / f"step-{step:08}", step)
    for name in ("model/config.json", "model/model.safetensors", "model/a b/c%2F&é.txt", "model/empty"):
        file = run.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"" if file.name == "empty" else name.encode() * 100)


def _checkpoint(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    state = {"step": step, "spec_sha256": "0" * 64, "micro_batch": 8, "validation_loss": 2.5 if step == 10 else None}
    contents = {
        "model.safetensors": b"w" * 200,
        "optimizer.safetensors": b"o" * 300,
        "state.json": json.dumps(state).encode(),
    }
    files = {}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def row(step: int) -> MetricRow:
    """A row of metrics as a trainer on a GPU writes it."""
    return MetricRow(
        step=step, at=1_763_733_600.0 + step, attempt=1, epoch=step / 20, loss=3.0 - step / 20, learning_rate=1e-4,
        grad_norm=0.8, rows_per_s=100.0, target_tokens_per_s=1000.0, tokens_per_s=2000.0, padding_fraction=0.1,
        model_flops_per_s=1e12, mfu=0.3, step_s=0.1, eta_s=float(20 - step), memory_bytes=2**20,
        memory_reserved_bytes=2**21, cache_clears=1, cache_clear_s=0.1, micro_batch=8, data_wait_fraction=0.01,
        gpu_utilization=0.9, gpu_memory_used_bytes=2**22, gpu_temperature_c=60, gpu_power_w=300.5,
    )  # fmt: skip
