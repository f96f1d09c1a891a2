"""What a W&B run says of its job: the specification with every `auto` decided, and what was found out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from jobs.errors import Damaged, NotFound
from jobs.events import JobSucceeded
from jobs.plan import Plan
from jobs.process.secrets import minimal_environment
from jobs.version import VERSION, library_versions
from worker.sinks.base import SinkJob
from worker.sinks.wandb.protocol import ArtifactRequest

# -- access ------------------------------------------------------------------------------------------------------------
# Whether a W&B run is online, and the environment of the process that holds it.

KEPT_VARIABLES = frozenset({"WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_HTTP_TIMEOUT"})


def why_offline(api_key: str | None, mode: str | None) -> str | None:
    """Why runs are offline from the beginning; None: they are online."""
    if mode == "offline":
        return "WANDB_MODE is offline"
    if not api_key:
        return "there is no WANDB_API_KEY"
    if mode not in (None, "online", "disabled"):
        return f"WANDB_MODE is {mode!r}; it is online, offline or disabled"
    return None


def child_environment(
    inherited: Mapping[str, str], api_key: str | None, base_url: str | None, online: bool
) -> dict[str, str]:
    """What is inherited, without other secrets and without settings of W&B that could change what we rely on.

    The key travels here: a command line can be read by every user of the machine.
    """
    environment = {
        key: value
        for key, value in minimal_environment(inherited, ()).items()
        if key in KEPT_VARIABLES or not key.startswith("WANDB_")
    } | {"WANDB_X_DISABLE_VIEWER": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    environment |= {"WANDB_API_KEY": api_key} if api_key and online else {}
    return environment | ({"WANDB_BASE_URL": base_url} if base_url else {})


# -- config ------------------------------------------------------------------------------------------------------------

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


# -- artifacts ---------------------------------------------------------------------------------------------------------
# Rows and model of a job as artifacts of its W&B run, if the job wants them: references, never their bytes.


def rows_artifact(job: SinkJob) -> list[ArtifactRequest]:
    """The prepared rows, named by their hash: jobs with the same rows share one artifact."""
    if not _wanted(job):
        return []
    try:
        data = job.plan().data
    except (Damaged, NotFound):  # the run is reported all the same
        return []
    if data.prepared is None:
        return []
    name = Path(data.prepared).name
    metadata = data.model_dump(mode="json", exclude={"prepared", "complete"}, exclude_none=True)
    # Publish does not see the rows, and the hash is their checksum.
    return [
        {
            "name": f"rows-{name}",
            "type": "dataset",
            "reference": f"longhaul://prepared/{name}",
            "path": "rows",
            "metadata": metadata,
        }
    ]


def model_artifact(job: SinkJob, fact: JobSucceeded) -> list[ArtifactRequest]:
    """The final model, as publish sees its folder."""
    if fact.model is None or not _wanted(job):
        return []
    place = Path(job.folder, fact.model).absolute().as_uri()
    metadata: dict[str, JsonValue] = {
        "job": job.id,
        "base_model": job.submitted.model,
        "step": fact.step,
        "loss": fact.loss,
    }
    return [{"name": f"model-{job.id}", "type": "model", "reference": place, "path": "model", "metadata": metadata}]


def _wanted(job: SinkJob) -> bool:
    wandb = job.spec.integrations.wandb
    return wandb is not None and wandb.artifacts
