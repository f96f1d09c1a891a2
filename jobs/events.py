"""Events: numbered facts about a job (design §6). A closed set of frozen types with past-tense names.

Also rows of metrics. The lines of an attempt file are in `jobs/attempt.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

Reason = Literal[
    "done", "interrupted", "device_busy", "out_of_memory", "oom_in_optimizer", "refused", "bad_data", "non_finite",
    "disk_full", "crash", "silent", "lost", "host_out_of_memory",
]  # fmt: skip


class Frozen(BaseModel):
    """Frozen and closed. NaN and infinities are refused: JSON has none, and a file with one could not be read again."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Fault(Frozen):
    """Why something failed: `code` for machines, `message` for people, `hint` for the way out."""

    code: str
    message: str
    hint: str | None = None
    param: str | None = None


class Fact(Frozen):
    """What happened; the envelope (`Event`) says when, to which attempt, and as which number."""

    by_trainer: ClassVar[bool] = False


class JobSubmitted(Fact):
    """Number 1 of every job."""

    type: Literal["job.submitted"] = "job.submitted"
    name: str
    model: str
    spec_sha256: str
    priority: int = 0
    max_restarts: int = 5
    metadata: dict[str, str] = {}
    dry_run: bool = False
    idempotency_key: str | None = None
    body_sha256: str | None = None
    discord: bool = True
    wandb: bool = True


class JobChecked(Fact):
    """The specification, the paths, the model's config and the first rows are in order."""

    type: Literal["job.checked"] = "job.checked"
    plan: dict[str, Any]
    """The provisional plan in short: rows looked at, steps, parameters, resolved `auto` values, `time`, `memory`."""


class JobPrepared(Fact):
    """All rows are validated and tokenised, and the model's files are in the store."""

    type: Literal["job.prepared"] = "job.prepared"
    data: dict[str, Any]
    """Rows read, kept, set aside by reason, duplicates, truncated; tokens, how many unknown, the characters behind
    those; characters normalised; percentiles of lengths. A few KB; in full in `dataset.json` of the run directory.
    """
    steps: int
    time: dict[str, Any] | None = None
    """What the run needs (jobs/plan.py: TimePlan), and as `text` the same for people, which is null on a CPU."""
    memory: dict[str, Any] | None = None
    """What it needs at its peak, what was tried and chosen (jobs/memory_plan.py), and as `text` the same for people."""


class JobQueued(Fact):
    """The job waits for a card: for the first time, or again after an attempt ended."""

    type: Literal["job.queued"] = "job.queued"
    not_before_s: float = 0.0
    """Seconds to wait before the next attempt, from the time of this event."""


class JobRequested(Fact):
    """A user wants the running job paused or cancelled (`none` takes it back)."""

    type: Literal["job.requested"] = "job.requested"
    request: Literal["none", "pause", "cancel"]


class AttemptStarted(Fact):
    """A supervisor has begun attempt `Event.attempt`; from here on it counts."""

    type: Literal["attempt.started"] = "attempt.started"
    worker: str
    device: str


class DeviceWaiting(Fact):
    """The attempt waits for the card; or, said of a queued job by reconcile: no train worker has a usable one."""

    type: Literal["device.waiting"] = "device.waiting"
    by_trainer: ClassVar[bool] = True
    message: str


class ModelLoaded(Fact):
    """The model is in memory, once, and has passed the guards."""

    type: Literal["model.loaded"] = "model.loaded"
    by_trainer: ClassVar[bool] = True
    parameters: int
    parameter_bytes: int
    dtype: str
    device: str
    seconds: float
    peak_ratio: float
    """Peak memory while loading / bytes of the parameters."""
    resumed_step: int | None = None
    """Step of the checkpoint that the attempt goes on from; null: from the start."""
    compiled: bool = False
    """Layers run compiled; false where the plan says so, and where compiling failed (the trainer's log says why)."""


class CardProcess(Frozen):
    """A process that computes on a card. In a container pid and name are those that the driver shows there."""

    pid: int
    name: str | None = None
    memory_bytes: int | None = None


class MemoryPlanned(Fact):
    """What this attempt trains with, once the card was looked at."""

    type: Literal["memory.planned"] = "memory.planned"
    by_trainer: ClassVar[bool] = True
    micro_batch: int
    """Rows of the longest shape."""
    recompute_layers: int
    optimizer: str
    peak_bytes: int
    """Predicted, CUDA context included."""
    budget_bytes: int
    """What the attempt may use."""
    foreign_bytes: int | None = None
    """What other processes hold of the card; null where nobody can tell."""
    foreign: list[CardProcess] = []
    """Those of them that the driver shows."""
    changed: str | None = None
    """Why this is not what plan.json says; null where it is."""


class MemoryMeasured(Fact):
    """The peak of the attempt's first step, beside what was predicted for that very step."""

    type: Literal["memory.measured"] = "memory.measured"
    by_trainer: ClassVar[bool] = True
    step: int
    measured_bytes: int
    predicted_bytes: int
    peak_bytes: int
    """Of the largest micro-batch that can come, by the prediction corrected with this measurement."""
    budget_bytes: int


class EvaluationFinished(Fact):
    """The model was looked at on validation rows."""

    type: Literal["evaluation.finished"] = "evaluation.finished"
    by_trainer: ClassVar[bool] = True
    step: int
    loss: float
    """Mean negative log likelihood of a target token, nats."""
    rows: int
    seconds: float
    best: bool
    samples: list[Sample] = []


class Sample(Frozen):
    """One generated text beside what the data has."""

    input: str
    target: str
    generated: str


class CheckpointSaved(Fact):
    """A checkpoint is on disk, complete and verified."""

    type: Literal["checkpoint.saved"] = "checkpoint.saved"
    by_trainer: ClassVar[bool] = True
    step: int
    path: str
    """Relative to the run directory."""
    bytes: int
    seconds: float
    validation_loss: float | None = None


class CheckpointRejected(Fact):
    """A checkpoint did not verify and was passed over; an older one is used."""

    type: Literal["checkpoint.rejected"] = "checkpoint.rejected"
    by_trainer: ClassVar[bool] = True
    path: str
    message: str


class DiskLow(Fact):
    """A save was skipped for want of room; training goes on."""

    type: Literal["disk.low"] = "disk.low"
    by_trainer: ClassVar[bool] = True
    step: int
    free_bytes: int
    needed_bytes: int


class OomRecovered(Fact):
    """Memory ran out inside a step; the same step was redone in smaller micro-batches. Nothing was lost."""

    type: Literal["oom.recovered"] = "oom.recovered"
    by_trainer: ClassVar[bool] = True
    step: int
    micro_batch_before: int
    """Rows of the longest shape, in this length bucket."""
    micro_batch_after: int
    """The same as before where clearing the cache, or waiting, was enough."""
    message: str
    milliseconds_lost: float
    cause: Literal["fragmentation", "foreign", "exhausted"] | None = None
    """Free memory in pieces too small; another process on the card; really too much. This and what follows: null in
    events of earlier versions, and where it cannot be known."""
    bucket: str | None = None
    """Lengths of the micro-batch that failed, such as `input ≤ 256, target ≤ 512`; later ones like it are cut alike."""
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    foreign_bytes: int | None = None
    """What other processes hold of the card."""
    evidence: str | None = None
    """Folder, relative to the run directory."""


class AttemptEnded(Fact):
    """The trainer process of attempt `Event.attempt` is gone."""

    type: Literal["attempt.ended"] = "attempt.ended"
    reason: Reason
    step: int = 0
    exit_code: int | None = None
    error: Fault | None = None


class JobPaused(Fact):
    """The job rests until it is resumed."""

    type: Literal["job.paused"] = "job.paused"


class JobResumed(Fact):
    """A paused job waits for a card again."""

    type: Literal["job.resumed"] = "job.resumed"


class JobValidated(Fact):
    """End of a dry run: nothing was wrong."""

    type: Literal["job.validated"] = "job.validated"


class JobSucceeded(Fact):
    """The model is done."""

    type: Literal["job.succeeded"] = "job.succeeded"
    model: str
    """Folder relative to the run directory."""
    step: int
    loss: float | None
    """Validation loss of the model that was kept."""
    first_loss: float | None = None
    seconds: float = 0.0
    """Time in attempts, all together."""


class JobFailed(Fact):
    """The job cannot go on; `error` says why and what to do."""

    type: Literal["job.failed"] = "job.failed"
    error: Fault


class JobCancelled(Fact):
    """A user did not want it any more. The newest checkpoint, if there is one, is kept."""

    type: Literal["job.cancelled"] = "job.cancelled"
    checkpoint: str | None = None


AnyFact = Annotated[
    JobSubmitted | JobChecked | JobPrepared | JobQueued | JobRequested | AttemptStarted | DeviceWaiting
    | MemoryPlanned | ModelLoaded | MemoryMeasured | EvaluationFinished | CheckpointSaved | CheckpointRejected
    | DiskLow | OomRecovered | AttemptEnded | JobPaused | JobResumed | JobValidated | JobSucceeded | JobFailed
    | JobCancelled,
    Field(discriminator="type"),
]  # fmt: skip


class Event(Frozen):
    """One line of events.jsonl: a fact with its number (1, 2, 3 … without gap), time and attempt."""

    number: Annotated[int, Field(ge=1)]
    job: str
    at: float
    """Unix time, seconds."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """The attempt it belongs to; 0 before the first."""
    fact: AnyFact

    @property
    def type(self) -> str:
        """The fact's name, e.g. `checkpoint.saved`."""
        return self.fact.type


class MetricRow(Frozen):
    """One line of metrics.jsonl: means over the steps since the one before. A later row for a `step` replaces."""

    step: int
    at: float
    attempt: int
    epoch: float
    loss: float
    """Mean negative log likelihood of a target token, nats, in fp32."""
    learning_rate: float
    grad_norm: float
    """Global norm before clipping."""
    rows_per_s: float
    target_tokens_per_s: float
    tokens_per_s: float | None = None
    """Input and target tokens, without padding. This and the next three: None in rows of earlier versions."""
    padding_fraction: float | None = None
    """Share of the positions that went through the model, inputs and targets, that were padding."""
    model_flops_per_s: float | None = None
    """What the model needs for these rows at their real lengths, forward and backward. None where it is not counted."""
    mfu: float | None = None
    """That as a share of the card's peak in bf16, 0 to 1. None on CPU, and for a card whose peak is not known."""
    step_s: float
    eta_s: float
    """Seconds left by what was measured so far: steps, evaluations and checkpoints."""
    memory_bytes: int
    """CUDA: allocated at peak since the last row; CPU: resident set now."""
    memory_reserved_bytes: int
    memory_planned_bytes: int | None = None
    """What was predicted for the largest micro-batch. None in rows of earlier versions, as are the next two."""
    memory_fragmentation: float | None = None
    """Share of the reserved memory that was not allocated at the peak, 0 to 1. None on CPU."""
    gpu_memory_foreign_bytes: int | None = None
    """What other processes hold of the card. None where nobody can tell."""
    cache_clears: int
    """Cache clearings so far in this attempt."""
    cache_clear_s: float
    """Seconds they took so far in this attempt."""
    cache_freed_bytes: int | None = None
    """What they gave back so far in this attempt. None in rows of earlier versions."""
    micro_batch: int
    data_wait_fraction: float
    """Share of step time spent waiting for data."""
    gpu_utilisation: float | None = None
    """Share of the driver's last sampling period (up to 1 s) in which the card was busy, 0 to 1. None on CPU."""
    gpu_memory_used_bytes: int | None = None
    """Of the whole card, by every process on it."""
    gpu_temperature_c: int | None = None
    gpu_power_w: float | None = None
    host_memory_used_bytes: int | None = None
    """Of the machine, or of the container where that has a lower limit; without page cache."""
    host_memory_available_bytes: int | None = None
    trainer_rss_bytes: int | None = None
    """Resident set of the trainer process."""


EvaluationFinished.model_rebuild()
any_fact: TypeAdapter[AnyFact] = TypeAdapter(AnyFact)
EVENT_TYPES: tuple[str, ...] = (
    "job.submitted", "job.checked", "job.prepared", "job.queued", "job.requested", "attempt.started", "device.waiting",
    "memory.planned", "model.loaded", "memory.measured", "evaluation.finished", "checkpoint.saved",
    "checkpoint.rejected", "disk.low", "oom.recovered", "attempt.ended", "job.paused", "job.resumed", "job.validated",
    "job.succeeded", "job.failed", "job.cancelled",
)  # fmt: skip
