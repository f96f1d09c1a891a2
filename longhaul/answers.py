"""What the service answers: plain dictionaries, in which a newer service may have more (docs/openapi.json)."""

from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar

JsonObject = dict[str, Any]
"""A document whose keys are not the client's business: a job file, plan.json, the facts of an event."""
MetricDict = dict[str, float | None]
"""A row of metrics, by name."""
T = TypeVar("T")


class PageDict(TypedDict, Generic[T]):
    """One page of a list."""

    object: str
    data: list[T]
    has_more: bool
    first_id: NotRequired[str | int | None]
    last_id: NotRequired[str | int | None]


class FaultDict(TypedDict):
    """Why something failed."""

    code: str
    message: str
    hint: str | None
    param: str | None


class ProgressDict(TypedDict):
    """How far training is."""

    step: int
    steps: int | None
    fraction: float | None
    epoch: float | None
    loss: float | None
    rows_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    memory_bytes: int | None
    eta_s: float | None
    eta_from: str | None
    at: float | None


class ActivityDict(TypedDict):
    """What the process of a job does now."""

    phase: str
    words: str
    since: float
    fraction: float | None


class SummaryDict(TypedDict):
    """A plan of time or memory, for people; its figures stand beside."""

    text: str | None


class PlanSummaryDict(TypedDict, total=False):
    """The plan in short; empty before check."""

    task: str
    model: str
    parameters: int
    train: str
    rows_looked_at: int
    rows_estimated: int
    invalid_rows: dict[str, int]
    duplicates: int
    all_rows: bool
    input: str | None
    target: str
    labels: int
    new_tensors: list[str]
    reading: str | None
    read_as: str | None
    steps: int
    limited_by: Literal["epochs", "max_steps", "max_hours", "early_stopping"]
    resolved: JsonObject
    time: SummaryDict | None
    memory: SummaryDict | None
    resume_from: JsonObject


class JobGpuDict(TypedDict):
    """A GPU that a train worker reports, and whether it can take the job."""

    uuid: str
    name: str
    memory_bytes: int
    can_take: bool
    why: str | None


class ConfidenceIntervalDict(TypedDict):
    """In which a figure lies with 95 % confidence."""

    low: float
    high: float


class VerdictDict(TypedDict):
    """Whether a model is better than before training."""

    outcome: str
    metric: str
    value: float
    interval: JsonObject | None
    against_base: JsonObject | None
    base: str
    text: str


class JobDict(TypedDict):
    """One job."""

    object: str
    id: str
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    status: str
    model: str
    fine_tuned_model: str | None
    kind: Literal["train", "evaluate"]
    error: FaultDict | None
    hyperparameters: dict[str, float | None]
    seed: int | None
    training_file: str | None
    validation_file: str | None
    method: dict[str, object] | None
    metadata: dict[str, str]
    organization_id: str
    result_files: list[str]
    trained_tokens: int | None
    name: str
    stage: str
    requested: str
    priority: int
    queue_position: int | None
    estimated_start: int | None
    dry_run: bool
    cloned_from: str | None
    sweep: str | None
    attempt: int
    restarts: int
    last_reason: str | None
    not_before: float | None
    waiting_reason: str | None
    engine: str | None
    task: str | None
    gpus: list[JobGpuDict]
    started_at: int | None
    training_s: float
    steps: int | None
    limited_by: Literal["epochs", "max_steps", "max_hours", "early_stopping"] | None
    progress: ProgressDict
    activity: ActivityDict | None
    first_loss: float | None
    best_loss: float | None
    final_loss: float | None
    chosen_by: str | None
    better_step: int | None
    kept_from: str | None
    final_metrics: dict[str, float]
    final_intervals: dict[str, ConfidenceIntervalDict]
    verdict: VerdictDict | None
    checkpoint: str | None
    plan: PlanSummaryDict
    data: JsonObject
    run_dir: str
    event_number: int
    spec: JsonObject | None


class RepairedDict(TypedDict):
    """What was done to a damaged job."""

    object: str
    message: str
    backups: list[str]
    job: JobDict


class DeletedJobDict(TypedDict):
    """A job that is gone."""

    id: str
    object: str
    deleted: bool


class EventDict(TypedDict):
    """Something that happened to a job; `data` are the facts of its `type`."""

    object: str
    id: str
    number: int
    job: str
    created_at: int
    at: float
    attempt: int
    level: str
    message: str
    type: str
    data: JsonObject


class CheckpointMetricsDict(TypedDict):
    """What is known of the weights of a checkpoint."""

    step: int
    train_loss: NotRequired[float]
    valid_loss: NotRequired[float]
    others: NotRequired[dict[str, float]]


class CheckpointDict(TypedDict):
    """A complete checkpoint on disk."""

    object: str
    id: str
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: CheckpointMetricsDict
    bytes: int
    best: bool
    path: str


class RunFileDict(TypedDict):
    """A file of a run directory."""

    object: str
    path: str
    bytes: int
    modified_at: float


class ExportDict(TypedDict):
    """One format of a model: there, being made, or refused."""

    object: str
    format: str
    status: str
    phase: str | None
    ahead: int | None
    error: FaultDict | None
    path: str | None
    report: JsonObject | None


class PushDict(TypedDict):
    """The newest upload of a job to the hub."""

    object: str
    repository: str
    status: str
    ahead: int | None
    error: FaultDict | None


class TrialDict(TypedDict):
    """One of the trials of a sweep: its settings, its jobs, and how it did."""

    object: str
    number: int
    status: Literal["running", "paused", "succeeded", "failed", "pruned", "cancelled"]
    settings: JsonObject
    jobs: list[str]
    gone: list[str]
    value: float | None
    values: list[float]
    started_at: int
    finished_at: int | None
    seconds: float
    message: str | None
    error: FaultDict | None


class SweepDict(TypedDict):
    """Many trials of one job, and which of them is the best."""

    object: str
    id: str
    name: str
    status: Literal["running", "succeeded", "failed", "cancelled"]
    reason: Literal["done", "max_hours", "failures", "cancelled"] | None
    cancel_requested: bool
    created_at: int
    finished_at: int | None
    metric: str
    direction: Literal["minimize", "maximize"]
    sampler: str
    pruning: str
    max_trials: int
    parameters: list[str]
    trials: dict[str, int]
    best: TrialDict | None
    importances: dict[str, float]
    waiting: NotRequired[str | None]
    error: FaultDict | None
    warnings: list[str]
    specification: JsonObject


class DeletedSweepDict(TypedDict):
    """A sweep that is gone, with the jobs of its trials."""

    id: str
    object: str
    deleted: bool


class DatasetDict(TypedDict):
    """An uploaded file of rows."""

    object: str
    name: str
    uri: str
    format: str
    bytes: int
    sha256: str
    created_at: int


class DatasetDetailDict(DatasetDict):
    """A data set, and what became of it."""

    jobs: list[str]
    in_use: bool
    report: JsonObject | None
    report_job: str | None


class DeletedDatasetDict(TypedDict):
    """A data set that is gone."""

    name: str
    object: str
    deleted: bool


class GpuDict(TypedDict):
    """A GPU, as its driver describes it."""

    uuid: str
    name: str
    memory_bytes: int
    native_bf16: NotRequired[bool]
    count: NotRequired[int]
    driver: str
    measured: NotRequired[JsonObject | None]
    host_memory_bytes: NotRequired[int | None]


class WorkerDict(TypedDict):
    """A worker heard of in the last minute; one of another version may say less."""

    name: str
    stage: str
    healthy: bool
    why: str | None
    pid: NotRequired[int | None]
    parent_pid: NotRequired[int | None]
    box: NotRequired[str | None]
    clock_ahead_s: NotRequired[float | None]
    queue: NotRequired[str | None]
    busy: NotRequired[bool | None]
    device: NotRequired[str | None]
    gpu: NotRequired[GpuDict | None]
    slot: NotRequired[int | None]
    engine: NotRequired[str | None]
    sinks: NotRequired[dict[str, dict[str, float]] | None]
    versions: NotRequired[dict[str, str] | None]
    job: str | None
    job_since: int | None
    last_seen_at: float
    heartbeat_age_s: float


class WorkersDict(PageDict[WorkerDict]):
    """Workers by name, and the jobs that none takes."""

    damaged: list[str]


class LabelProbabilityDict(TypedDict):
    """A class, and how probable the model finds it."""

    label: str
    probability: float


class OutputDict(TypedDict):
    """What one model answered to one input."""

    model: Literal["trained", "base"]
    index: int
    input: str
    input_tokens: int
    input_cut: bool
    text: str
    tokens: int
    finish_reason: Literal["stop", "length"]
    labels: list[LabelProbabilityDict] | None
    error: str | None


class GenerationDict(TypedDict):
    """What the model of a job answered."""

    object: str
    job: str
    checkpoint: str | None
    outputs: list[OutputDict]
    device: Literal["cpu", "cuda"]
    why: str | None
    seconds: float
    loading_s: float
    tokens_per_s: float | None
    seed: int | None
