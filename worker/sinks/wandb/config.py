"""What a W&B run says of its job: the specification with every `auto` decided, and what was found out of it."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from jobs.errors import Damaged, NotFound
from jobs.plan import Plan
from jobs.version import VERSION, library_versions
from worker.sinks.base import SinkJob

LONGEST_TAG = 64
NOTES = ("notes", "description")
"""Keys of the metadata that become the notes of the run; all others become tags."""
_LIBRARIES = ("torch", "transformers", "tokenizers")
_OURS = {"name", "metadata", "integrations", "log"}
"""Parts of a job that say nothing about the model."""


def run_config(job: SinkJob) -> dict[str, JsonValue]:
    """The job as it runs: comparable between runs, whether a value was set or `auto`."""
    config: dict[str, JsonValue] = job.spec.model_dump(mode="json", exclude=_OURS)
    config["versions"] = {"longhaul": VERSION, **library_versions(*_LIBRARIES)}
    try:
        return _decided(config, job.plan())
    except (Damaged, NotFound):  # the run is reported all the same
        return config


def _decided(config: dict[str, JsonValue], plan: Plan) -> dict[str, JsonValue]:
    resolved = plan.resolved
    parts: dict[str, dict[str, JsonValue]] = {
        "memory": resolved.model_dump(include={"micro_batch", "activation_checkpointing", "optimizer"}),
        "speed": {"compile": resolved.compile},
        "data": {
            "input": plan.data.input, "target": plan.data.target, "rows": plan.data.rows,
            "validation_rows": plan.data.validation_rows,
            "prepared": plan.data.prepared and Path(plan.data.prepared).name,
        },
    }  # fmt: skip
    for part, decided in parts.items():
        before = config[part]
        assert isinstance(before, dict), "a part of a job is an object"
        config[part] = before | decided
    config |= {
        "steps": plan.steps, "warmup_steps": plan.warmup_steps, "parameters": plan.model.parameters,
        "model_revision": plan.model.revision,
    }  # fmt: skip
    if plan.memory is not None:
        config |= {
            "gpu": plan.memory.gpu, "memory_budget_bytes": plan.memory.budget_bytes,
            "memory_planned_bytes": plan.memory.peak_bytes,
        }  # fmt: skip
    return config


def tags(job: SinkJob) -> list[str]:
    """The metadata of the job and the sweep that it is a trial of, `key:value`, as W&B takes them."""
    found = [f"sweep:{job.submitted.sweep}"] if job.submitted.sweep else []
    found += [f"{key}:{value}" for key, value in job.submitted.metadata.items() if key not in NOTES]
    return [tag[:LONGEST_TAG] for tag in found]


def notes(job: SinkJob) -> str | None:
    """What a person wrote about the job."""
    return next((job.submitted.metadata[key] for key in NOTES if job.submitted.metadata.get(key)), None)
