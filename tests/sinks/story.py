"""Run directories that tell a story, for tests of publish and the sinks."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from jobs.disk.files import append_line
from jobs.disk.rundir import RunDir, create
from jobs.events import AttemptEnded, AttemptStarted, JobFailed, JobQueued, JobSubmitted, JobSucceeded
from jobs.metrics import MetricRow
from jobs.spec import JobSpec
from jobs.trainer_facts import EvaluationFinished, Fault, ModelLoaded, Sample
from jobs.verdict import Verdict
from tests.support.samples import checked, prepared, time_summary

STEPS = 400
LOADED = ModelLoaded(
    parameters=2_849_757_184,
    parameter_bytes=5_699_514_368,
    dtype="bf16",
    device="cuda:0",
    seconds=41.0,
    peak_ratio=1.01,
)
SUCCEEDED = JobSucceeded(model="model", step=STEPS, loss=0.91, first_loss=2.31, seconds=4321.0)


def submit(
    runs: Path, job: str = "job-1", name: str = "chef", integrations: dict[str, Any] | None = None, **more: Any
) -> RunDir:
    """A job that has just been submitted. `more`: of JobSubmitted."""
    runs.mkdir(exist_ok=True)
    given = {"name": name, "data": {"train": "recipes.jsonl"}, "integrations": integrations or {}}
    spec = JobSpec.model_validate(given)
    first = JobSubmitted(name=name, model=spec.model, spec_sha256="0" * 64, **more)
    return create(runs, job, spec, first)[0]


def start(run: RunDir, time: str | None = None) -> None:
    """Checked, prepared, queued, and attempt 1 has its model. `time`: what it needs, as planned."""
    planned = None if time is None else time_summary(text=time)
    run.append([checked(steps=STEPS), prepared(STEPS, time=planned), JobQueued()])
    run.append([AttemptStarted(worker="box-1", device="NVIDIA GeForce RTX 5090"), LOADED, evaluation(0, 2.31)])


def evaluation(step: int, loss: float, samples: int = 0, text: str = "Boil the rice.") -> EvaluationFinished:
    """One evaluation, with so many samples of this text."""
    told = [Sample(input=text, target=text, generated=text)] * samples
    return EvaluationFinished(step=step, loss=loss, rows=512, seconds=9.0, best=True, samples=told)


def row(step: int, attempt: int = 1) -> MetricRow:
    """A plausible row of metrics; its loss is a function of the step."""
    return MetricRow(
        step=step,
        at=time.time(),
        attempt=attempt,
        epoch=step / 80,
        loss=0.9 + 1.4 * math.exp(-step / 60) + 0.05 * math.sin(step * 1.7),
        learning_rate=1e-4 * (1 - step / STEPS),
        grad_norm=0.7,
        rows_per_s=38.2,
        target_tokens_per_s=9800.0,
        tokens_per_s=14_700.0,
        padding_fraction=0.04,
        model_flops_per_s=1.26e14,
        mfu=0.6014,
        step_s=3.35,
        eta_s=(STEPS - step) * 3.35,
        memory_bytes=27 * 2**30,
        memory_reserved_bytes=29 * 2**30,
        cache_clears=step // 50,
        cache_clear_s=0.4,
        micro_batch=8,
        data_wait_fraction=0.01,
        gpu_utilization=0.97,
        gpu_memory_used_bytes=30 * 2**30,
        gpu_temperature_c=71,
        gpu_power_w=412.5,
        host_memory_used_bytes=21 * 2**30,
        host_memory_available_bytes=43 * 2**30,
        trainer_rss_bytes=9 * 2**30,
    )


def train(run: RunDir, first: int, last: int, every: int = 10, attempt: int = 1) -> None:
    """Rows of metrics for the steps from `first` to `last`."""
    for step in range(first, last + 1, every):
        append_line(run.metrics_file, row(step, attempt))


def succeed(
    run: RunDir,
    samples: int = 2,
    text: str = "Boil the rice.",
    verdict: Verdict | None = None,
    better_step: int | None = None,
) -> None:
    """The last evaluation, and the end. `better_step`: of the model that would have been kept, were it not lost."""
    chosen = {} if better_step is None else {"chosen_by": "loss", "better_step": better_step}
    succeeded = SUCCEEDED.model_copy(update={"verdict": verdict, **chosen})
    run.append(
        [evaluation(STEPS, 0.91, samples, text), AttemptEnded(reason="done", step=STEPS, exit_code=0), succeeded]
    )


def fail(run: RunDir, error: Fault) -> None:
    """The attempt ends with this error, and the job with it."""
    run.append([AttemptEnded(reason="rejected", step=0, exit_code=77, error=error), JobFailed(error=error)])
