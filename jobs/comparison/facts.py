"""What is known of a job that is compared, and what of it can differ beside its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, JsonValue
from pydantic_core import PydanticUndefined, to_jsonable_python

from jobs.comparison.answer import GroupName
from jobs.dataset_report import PreparedSummary
from jobs.events import AttemptStarted, Event, JobSubmitted
from jobs.memory_plan import MemoryPlan
from jobs.plan import CheckSummary, Plan
from jobs.record import JobRecord
from jobs.spec import JobSpec, LoraMethod
from jobs.state import Status
from jobs.trainer_facts import MemoryMeasured, MemoryPlanned, ModelLoaded, OomRecovered

# -- settings ----------------------------------------------------------------------------------------------------------
# The settings of a job file by dotted key, and which of them differ.

_LABELS = ("name", "metadata", "priority", "integrations")
_GROUPS: dict[str, GroupName] = {
    "data": "data", "model": "model", "method.base_dtype": "model",
    "method.adapter_dtype": "model", "memory": "memory", "resources": "gpu",
}  # fmt: skip
"""By the beginning of a key; all others are `training`."""


@dataclass(frozen=True)
class JobSetting:
    """A key of one job."""

    value: JsonValue
    default: JsonValue
    """What the key is where it is left out; null for one that has to be set."""


def settings_of(spec: JobSpec) -> dict[str, JobSetting]:
    """Every key that this job has: of `method: full`, for one, none of LoRA's."""
    return dict(_leaves(spec, ""))


def differing_settings(specs: Sequence[JobSpec]) -> tuple[dict[str, list[JsonValue]], int]:
    """Values of each job by key, where they differ; and how many other keys there are, labels aside.

    A key that one job does not have, and that has its default in all others, is no difference: the one that brought it
    (`method.type`) is.
    """
    every = [settings_of(spec) for spec in specs]
    found: dict[str, list[JsonValue]] = {}
    equal = 0
    for key in dict.fromkeys(key for settings in every for key in settings):
        having = [settings[key] for settings in every if key in settings]
        values = [settings[key].value if key in settings else having[0].default for settings in every]
        if any(value != values[0] for value in values):
            found[key] = [settings[key].value if key in settings else None for settings in every]
        elif not is_label(key):
            equal += 1
    return found, equal


def is_label(key: str) -> bool:
    """Whether it says nothing about the model that comes of the job."""
    return key.partition(".")[0] in _LABELS


def group_of(key: str) -> GroupName:
    """Where a difference of the job file belongs that is no label."""
    return _GROUPS.get(key) or _GROUPS.get(key.partition(".")[0], "training")


def _leaves(part: BaseModel, prefix: str) -> Iterator[tuple[str, JobSetting]]:
    for name, field in type(part).model_fields.items():
        key, value = f"{prefix}{name}", getattr(part, name)
        default = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            if type(None) in get_args(field.annotation):  # null switches it off (`integrations.wandb`)
                yield key, JobSetting(True, None)
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, dict):
            yield from ((f"{key}.{each}", JobSetting(text, None)) for each, text in value.items())
        else:
            plain = None if default is PydanticUndefined else to_jsonable_python(default)
            yield key, JobSetting(to_jsonable_python(value), plain)


# -- facts -------------------------------------------------------------------------------------------------------------

LACKED_MEMORY = {"does_not_fit", "out_of_memory", "gpu_memory_in_use"}
"""Codes of errors of jobs whose memory did not suffice."""
_OF_REPORT = {
    "rows_read", "kept", "duplicates", "train_rows", "validation_rows", "validation_inputs_in_training",
    "truncated_inputs", "truncated_targets", "input_tokens", "target_tokens", "unknown_tokens",
}  # fmt: skip
_COUNTS = ("rejected", "noticed", "rewritten", "normalized")
"""Of the report on the rows: counts by reason or character."""
_COUNTED = tuple(f"data.{name}." for name in _COUNTS)
Facts = dict[str, JsonValue]


@dataclass(frozen=True)
class MeanPace:
    """Of all rows of metrics; None: there is none that says it."""

    rows_per_s: float | None = None
    """Their mean, as are the next two."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    """The highest."""


@dataclass(frozen=True)
class JobFacts:
    """Of one job. Of events that each attempt has, the newest one."""

    spec: JobSpec
    record: JobRecord
    plan: Plan | None
    pace: MeanPace
    version: str | None = None
    """Of the Longhaul that made it."""
    recoveries: int = 0
    """Out-of-memory errors that cost only time."""
    started: AttemptStarted | None = None
    loaded: ModelLoaded | None = None
    planned: MemoryPlanned | None = None
    measured: MemoryMeasured | None = None

    @classmethod
    def of(
        cls, spec: JobSpec, record: JobRecord, plan: Plan | None, events: Sequence[Event], pace: MeanPace = MeanPace()
    ) -> JobFacts:
        """Those that its run directory holds."""
        version, recoveries, started, loaded, planned, measured = None, 0, None, None, None, None
        for event in events:
            match event.fact:
                case JobSubmitted() as fact:
                    version = fact.version or None
                case AttemptStarted() as fact:
                    started, planned, measured = fact, None, None
                case ModelLoaded() as fact:
                    loaded = fact
                case MemoryPlanned() as fact:
                    planned = fact
                case MemoryMeasured() as fact:
                    measured = fact
                case OomRecovered():
                    recoveries += 1
        return cls(spec, record, plan, pace, version, recoveries, started, loaded, planned, measured)

    @property
    def lacked_memory(self) -> bool:
        """Whether it was refused, or failed, because its memory did not suffice."""
        error = self.record.error
        return self.record.status is Status.FAILED and error is not None and error.code in LACKED_MEMORY

    @property
    def memory(self) -> MemoryPlan | None:
        """Its plan of memory."""
        return None if self.plan is None else self.plan.memory

    @property
    def parameters(self) -> int:
        """Of the model, adapters aside; 0: not known."""
        return 0 if self.plan is None else self.plan.model.parameters

    def limit_key(self, side: str) -> str | None:
        """Key of `data` that limits the tokens of inputs or targets; None: a label is short."""
        match self.plan and self.plan.task, side:
            case "causal", _:
                return "max_tokens"
            case "classification" | "regression", "target":
                return None
        return f"max_{side}_tokens"

    @cached_property
    def adapter_bytes(self) -> int:
        """Of `parts["weights"]`: those of its adapters."""
        if self.memory is None or self.adapter_dtype is None:
            return 0
        return self.memory.trained_parameters * _width(self.adapter_dtype)

    @property
    def adapter_dtype(self) -> str | None:
        """Type of its adapters; None: it has none."""
        method = self.spec.method
        if not isinstance(method, LoraMethod):
            return None
        if method.adapter_dtype != "auto":
            return method.adapter_dtype
        return "float32" if self.memory is not None and self.memory.dtype == "float16" else "bfloat16"

    @property
    def planned_dtype(self) -> str | None:
        """Type of the weights of the model, adapters aside, by the bytes that the plan counts."""
        if self.memory is None:
            return None
        base = self.memory.parts.get("weights", 0) - self.adapter_bytes
        return "float32" if round(base / max(1, self.parameters)) == 4 else self.memory.dtype

    @property
    def base_dtype(self) -> str | None:
        """The same as loaded, else as planned."""
        return self.planned_dtype if self.loaded is None else self.loaded.dtype

    @property
    def unplanned_weight_bytes(self) -> int:
        """How many bytes more the weights have as loaded, where they are of another type than planned."""
        loaded, planned = self.loaded, self.planned_dtype
        if loaded is None or planned is None or planned == loaded.dtype:
            return 0
        return loaded.parameter_bytes - _width(planned) * loaded.parameters

    def of_plan(self) -> Facts:
        """What check and prepare found out and decided, by key."""
        record, found = self.record, Facts()
        if isinstance(record.plan, CheckSummary):
            summary = record.plan
            found |= {"plan.read_as": summary.read_as, "plan.input": summary.input, "plan.target": summary.target}
        if isinstance(record.data, PreparedSummary):
            found |= _of_report(record.data)
        if self.plan is None:
            return found
        plan, memory = self.plan, self.memory
        resolved = {f"resolved.{key}": value for key, value in plan.resolved.model_dump(exclude={"dtype"}).items()}
        found |= {
            "plan.task": plan.task, "model.revision": plan.model.revision, "model.parameters": plan.model.parameters,
            "model.new": len(plan.model.new), **resolved, "steps": plan.steps, "warmup_steps": plan.warmup_steps,
        }  # fmt: skip
        if memory is not None:
            found |= {
                "memory.device": memory.device, "memory.gpu": memory.gpu, "memory.budget_bytes": memory.budget_bytes,
                "memory.input_tokens": memory.input_tokens, "memory.target_tokens": memory.target_tokens,
                "memory.trained_parameters": memory.trained_parameters,
                "memory.peak_bytes": memory.peak_bytes,
                **{f"memory.parts.{name}": size for name, size in memory.parts.items()},
            }  # fmt: skip
        if plan.time is not None:
            found["time.hours_expected"] = plan.time.hours_expected
        return found

    def of_run(self) -> Facts:
        """What came of it, by key; all that can be compared between runs, and nothing that differs in any two."""
        record, error = self.record, self.record.error
        loaded, started, measured = self.loaded, self.started, self.measured
        versions = dict(started.versions) if started is not None else {}
        return {
            "model.dtype": self.base_dtype,
            "model.peak_ratio": None if loaded is None else round(loaded.peak_ratio, 1),
            "model.compiled": None if loaded is None else loaded.compiled,
            "memory.measured_bytes": None if measured is None else measured.measured_bytes,
            "memory.other_processes_bytes": None if self.planned is None else self.planned.other_processes_bytes,
            **{f"versions.{name}": versions.get(name) for name in ("torch", "transformers", "driver")},
            "versions.longhaul": versions.get("longhaul", self.version),
            "gpu.name": None if started is None else started.gpu_name or started.device,
            "status": record.status.value,
            "error.code": None if error is None else error.code,
            "error.message": None if error is None else error.message,
            "first_loss": record.first_loss,
            "best_loss": record.best_loss,
            "final_loss": record.result_loss,
            **{f"final_metrics.{name}": value for name, value in record.result_metrics.items()},
            "training_s": round(record.training_s, 1) or None,
            "metrics.rows_per_s": self.pace.rows_per_s,
            "metrics.tokens_per_s": self.pace.tokens_per_s,
            "metrics.mfu": self.pace.mfu,
            "metrics.memory_bytes": self.pace.memory_bytes,
            "oom_recoveries": self.recoveries,
            "restarts": record.restarts,
        }


_GROUP_OF_RUN: Mapping[str, GroupName] = {
    "plan": "data", "data": "data", "model": "model", "memory": "memory", "resolved": "memory", "versions": "versions",
    "gpu": "gpu", "steps": "training", "warmup_steps": "training", "time": "outcome",
}  # fmt: skip


def group_of_fact(key: str) -> GroupName:
    """Where a difference of a plan or of a run belongs."""
    special: Mapping[str, GroupName] = {
        "plan.task": "model", "memory.gpu": "gpu", "memory.device": "gpu", "resolved.compile": "training",
        "model.compiled": "training", "memory.trained_parameters": "model",
    }  # fmt: skip
    return special.get(key) or _GROUP_OF_RUN.get(key.partition(".")[0], "outcome")


def differing_facts(jobs: Sequence[JobFacts], read: Callable[[JobFacts], Facts]) -> dict[str, list[JsonValue]]:
    """Values of each job by key, where two that are known differ; null: unknown."""
    every = [read(job) for job in jobs]
    found: dict[str, list[JsonValue]] = {}
    for key in dict.fromkeys(key for facts in every for key in facts):
        counted = key.startswith(_COUNTED)  # one that the report does not name is none
        values = [facts.get(key, 0 if counted and "data.kept" in facts else None) for facts in every]
        known = [value for value in values if value is not None]
        if any(value != known[0] for value in known):
            found[key] = values
    return found


def _width(dtype: str) -> int:
    """Bytes of a weight."""
    return 4 if dtype == "float32" else 2


def _of_report(report: PreparedSummary) -> Facts:
    """Counts of rows and tokens, and how long the longest texts are."""
    found: Facts = {f"data.{name}": getattr(report, name) for name in sorted(_OF_REPORT)}
    for name in _COUNTS:
        found |= {f"data.{name}.{each}": count for each, count in getattr(report, name).items()}
    for side in ("input", "target"):
        found[f"data.lengths.{side}.max"] = getattr(report.lengths, side).after.max
    return found | {"data.prepared": Path(report.prepared).name}
