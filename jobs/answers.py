"""What the service answers, field by field: plain dictionaries, in which a newer service may have more.

Routes return them. `service/answers/__init__.py` describes them for the OpenAPI document; for a client they need no
pydantic. A field without NotRequired is always there. OpenAI's names keep their meaning.
"""

from importlib import import_module
from typing import Annotated, Any, Literal, NotRequired, Union

from typing_extensions import TypedDict

from jobs.data_names import FileFormat

JsonObject = dict[str, Any]
"""A document whose keys are not the client's business: a job file, plan.json, the facts of an event."""
MetricDict = dict[str, float | None]
"""A row of metrics, by name."""


class Declared:
    """Beside a type that says enough to a client: what the service takes it for (`jobs.trainer_facts:Fault`)."""

    def __init__(self, *names: str) -> None:
        self._names = [name.split(":") for name in names]

    def __get_pydantic_core_schema__(self, _: object, handler: Any) -> Any:
        """Pydantic asks for it, and only the service has pydantic make a schema: a client imports none of them."""
        return handler.generate_schema(Union[*(getattr(import_module(module), name) for module, name in self._names)])


# What `jobs` stores is declared where it is made. The service answers its models, the client gets them as JSON.
CheckSummary = Annotated[Any, Declared("jobs.plan:CheckSummary", "jobs.frozen:Empty")]
ConfidenceInterval = Annotated[Any, Declared("jobs.verdict:ConfidenceInterval")]
DatasetReport = Annotated[Any, Declared("jobs.dataset_report:DatasetReport")]
ExportReport = Annotated[Any, Declared("jobs.export:ExportReport")]
Fault = Annotated[Any, Declared("jobs.trainer_facts:Fault")]
JobSpec = Annotated[Any, Declared("jobs.spec:JobSpec")]
Method = Annotated[Any, Declared("jobs.spec:Method")]
Output = Annotated[Any, Declared("jobs.generation:Output")]
PreparedSummary = Annotated[Any, Declared("jobs.dataset_report:PreparedSummary", "jobs.frozen:Empty")]
Verdict = Annotated[Any, Declared("jobs.verdict:Verdict")]
Worker = Annotated[Any, Declared("jobs.heartbeat:Worker")]
Settings = Annotated[JsonObject, Declared("jobs.sweeps.space:Settings")]
ExportFormat = Annotated[str, Declared("jobs.export:ExportFormat")]
Phase = Annotated[str, Declared("jobs.attempt:Phase")]
Reason = Annotated[str, Declared("jobs.reasons:Reason")]
Requested = Annotated[str, Declared("jobs.state:Requested")]
Stage = Annotated[str, Declared("jobs.state:Stage")]
StepLimit = Annotated[Any, Declared("jobs.plan:StepLimit")]
SweepStatus = Annotated[str, Declared("jobs.sweeps.record:SweepStatus")]
Ending = Annotated[str, Declared("jobs.sweeps.events:Ending")]

ShownStatus = Literal[
    "validating", "queued", "running", "paused", "succeeded", "failed", "cancelled", "validated", "damaged"
]  # fmt: skip
"""Every state, and damaged."""
TrialStatus = Literal["running", "paused", "succeeded", "failed", "pruned", "cancelled"]
WorkStatus = Literal["queued", "running", "done", "failed"]


class Page(TypedDict):
    """What every list has beside its `data`."""

    object: Literal["list"]
    """Always `list`."""
    has_more: bool
    """Whether there is more after the last one."""


class Hyperparameters(TypedDict):
    """OpenAI's three, from `spec.training`; null with it."""

    n_epochs: int | None
    """Passes over all rows."""
    batch_size: int | None
    """Rows of one optimizer step."""
    learning_rate: float | None
    """Peak learning rate. Absolute: OpenAI's `learning_rate_multiplier` would need a base that only they know."""


class Progress(TypedDict):
    """How far training is, by the newest row of metrics of this attempt, or of the last one. Null: not known yet."""

    step: int
    """Optimizer steps done. Between attempts those of the newest checkpoint: the others are done again."""
    steps: int | None
    """Of so many."""
    fraction: float | None
    """That as a share, 0 to 1."""
    epoch: float | None
    """Passes over the rows, with a fraction."""
    loss: float | None
    """Mean negative log likelihood of a target token (of a classifier: of a row), nats; of a regression the
    mean squared error."""
    rows_per_s: float | None
    """Training rows a second."""
    tokens_per_s: float | None
    """Input and target tokens a second, without padding."""
    mfu: float | None
    """What the model needs for them as a share of the GPU's peak, 0 to 1; null on a CPU."""
    memory_bytes: int | None
    """On a GPU: allocated at peak; on a CPU: resident set."""
    eta_s: float | None
    """Seconds left, from `at` on, or from the start of the attempt while that is null; null unless it runs."""
    eta_from: Literal["measured", "plan"] | None
    """Whether `eta_s` was measured or only planned."""
    at: float | None
    """Unix time of the row, seconds."""


class JobActivity(TypedDict):
    """What the process of a job does now."""

    phase: Phase
    """`load`, `compile`, `step`, `evaluate` and so on; `wait`: it waits for its GPU."""
    words: str
    """The phase for people, such as `loading the model`."""
    since: float
    """When it began, Unix seconds."""
    fraction: float | None
    """How far it is, 0 to 1; null: not known."""


class JobGpu(TypedDict):
    """A GPU that a train worker reports, and whether it can take the job."""

    uuid: str
    """As the driver names it for good."""
    name: str
    """Such as `NVIDIA GeForce RTX 5090`; of GPUs that train together `2 × NVIDIA GeForce RTX 5090`."""
    memory_bytes: int
    """All of it; of several, of each."""
    can_take: bool
    """Whether it has what `resources` of the job ask for and, once that is planned, room for its smallest setting."""
    why: str | None
    """Why it cannot take the job; null where it can."""


class Job(TypedDict):
    """One job. Times are Unix seconds; paths begin with the name of the runs folder. Null: not yet, or not at all."""

    # OpenAI's names
    object: Literal["fine_tuning.job"]
    """Always `fine_tuning.job`."""
    id: str
    """`job-` and 20 digits; ids sort by time."""
    created_at: int
    """When it was submitted."""
    finished_at: int | None
    """When it succeeded, failed, was cancelled, or was validated."""
    estimated_finish: int | None
    """When it is expected to be done: by the job's own pace once that was measured, before by what is planned."""
    status: ShownStatus
    """Its state. Final: `succeeded`, `failed`, `cancelled`, `validated` (the end of a dry run). `damaged`: its run
    directory cannot be read, and `error` says why; the other fields are those last known."""
    model: str
    """As asked for: hub id, folder in the data directory, or `builtin:t5-tiny`."""
    fine_tuned_model: str | None
    """Folder of the result; download it from `/jobs/{job}/files/model`."""
    error: Fault | None
    """Why it failed, why it is paused although no user asked for that, or what is damaged; and what to do."""
    hyperparameters: Hyperparameters
    seed: int | None
    """Order of rows and dropout follow from it."""
    training_file: str | None
    """`data.train` of the specification; several sources with commas between them."""
    validation_file: str | None
    """`data.validation`, where that is a file or data set of its own."""
    method: Method | None
    """Which weights are trained, and how: `{"type": "full"}`, or `lora` with its settings."""
    metadata: dict[str, str]
    """Your own labels; lists can be filtered by them."""
    organization_id: Literal["longhaul"]
    """Always `longhaul`: one box, one team."""
    result_files: list[str]
    """Of a job that has succeeded: paths for `/jobs/{job}/files/{path}`, which lists the others."""
    trained_tokens: int | None
    """Always null: `/jobs/{job}/metrics` tells more."""
    # ours
    kind: Literal["train", "evaluate"]
    """Whether the model is trained, or only measured."""
    name: str
    """Shown wherever the job is; need not be unique."""
    stage: Stage
    """`check` looks at the specification, `prepare` at all the rows, `train` trains."""
    requested: Requested
    """What was asked of a running job and has not happened yet."""
    priority: int
    """Higher runs first."""
    queue_position: int | None
    """Place in the queue of its stage, from 1; null unless it waits."""
    estimated_start: int | None
    """When a waiting job's turn is expected to come; null if unknown."""
    dry_run: bool
    """Only checked, never trained."""
    cloned_from: str | None
    """The job whose specification this one began with."""
    sweep: str | None
    """The sweep that it is a trial of; null: none."""
    attempt: int
    """Number of the newest attempt to train; 0 before the first."""
    restarts: int
    """Restarts after crashes since the last progress."""
    last_reason: Reason | None
    """How the attempt before ended."""
    not_before: float | None
    """A job that waits after a crash is not started before this time."""
    waiting_reason: str | None
    """Why it cannot start though its turn has come, or that no GPU here can take it; of one that waits to be checked or
    prepared, which other job has been at that for a minute or more; of a running job, why it waits on its engine."""
    engine: str | None
    """The engine that trains it (`resources.engine`); null: a machine of Longhaul's own."""
    task: str | None
    """The engine's id of its newest attempt; null: the engine has not taken it."""
    gpus: list[JobGpu]
    """Those that train workers report, while the job has not ended, and after a dry run."""
    started_at: int | None
    """When its first attempt began."""
    training_s: float
    """Seconds in attempts that have ended."""
    steps: int | None
    """Optimizer steps of the whole run, once it is prepared."""
    limited_by: StepLimit | None
    """What decides their number: the epochs, or a key of `training` that allows fewer."""
    progress: Progress
    activity: JobActivity | None
    """Null: no process of it runs, or it has not said yet what it does."""
    first_loss: float | None
    """Validation loss before the first step, nats per target token (of a classifier: per row; of a regression the mean
    squared error); null where nothing is trained."""
    best_loss: float | None
    """Lowest validation loss so far; null as above."""
    final_loss: float | None
    """Validation loss of the model that was kept, or evaluated."""
    chosen_by: str | None
    """The metric by which `fine_tuned_model` is the best; null: it is the last step's, or there is none."""
    better_step: int | None
    """The step whose evaluation was better by that metric, and whose checkpoint is missing: there was no room for it,
    or it was damaged. Null: there is none."""
    kept_from: str | None
    """The job (`resume_from`) that trained that model: no step since was better. Null: this one has."""
    final_metrics: dict[str, float]
    """Other metrics of that model, by name."""
    final_intervals: dict[str, ConfidenceInterval]
    """Of `loss` and these metrics, by name: in which they lie with 95 % confidence; without those of too few rows."""
    verdict: Verdict | None
    """Whether that model is better than before training, by which metric, and how sure that is."""
    checkpoint: str | None
    """Newest checkpoint, relative to `run_dir`."""
    plan: CheckSummary
    """What it will need, in short: steps, time, memory; in full at `/jobs/{job}/plan`. Empty before it is checked."""
    data: PreparedSummary
    """What was found in the rows: kept, rejected, cut, lengths. Empty before it is prepared."""
    run_dir: str
    """Folder of everything that is known of it."""
    event_number: int
    """Number of its newest event: the version of this answer."""
    spec: JobSpec | None
    """The specification, with every default; null if it is damaged and unknown."""


class JobList(Page):
    """Jobs, newest first."""

    data: list[Job]
    first_id: str | None
    """Id of the first one; null for an empty list."""
    last_id: str | None
    """Id of the last one: `after` of the next page."""


class Repaired(TypedDict):
    """What was done to a damaged job."""

    object: Literal["fine_tuning.job.repair"]
    """Always `fine_tuning.job.repair`."""
    message: str
    """What was damaged, and what is lost."""
    backups: list[str]
    """Names of the copies of damaged files, in its run directory."""
    job: Job


class DeletedJob(TypedDict):
    """It is gone, and its run directory with it."""

    id: str
    """Which one it was."""
    object: Literal["fine_tuning.job"]
    """Always `fine_tuning.job`."""
    deleted: Literal[True]
    """Always true."""


class ShownEvent(TypedDict):
    """What every event has."""

    object: Literal["fine_tuning.job.event"]
    """Always `fine_tuning.job.event`."""
    id: str
    """`<job>:<number>`."""
    number: int
    """1, 2, 3 … without gap: `after`, and the `id` of a live stream."""
    job: str
    """Whose it is."""
    created_at: int
    """Unix time, whole seconds."""
    at: float
    """Unix time, seconds."""
    attempt: int
    """The attempt it belongs to; 0 before the first."""
    level: Literal["info", "warn", "error"]
    """How loud it is."""
    message: str
    """The same as `type` and `data`, for people."""
    type: str
    """What happened."""
    data: JsonObject
    """The fact."""


class EventList(Page):
    """Events in order."""

    data: list[ShownEvent]
    first_id: int | None
    """Number of the first one; null for an empty list."""
    last_id: int | None
    """Number of the last one: `after` of the next page."""


class MetricList(Page):
    """Rows in order of step; with `points`, the means of stretches."""

    data: list[MetricDict]


class CheckpointMetrics(TypedDict):
    """What is known of exactly these weights."""

    step: int
    """Optimizer steps done."""
    train_loss: NotRequired[float]
    """Training loss of the newest row of metrics up to here; left out where there is none."""
    valid_loss: NotRequired[float]
    """Validation loss, nats per target token (of a classifier: per row; of a regression the mean squared error);
    left out where they were not evaluated."""
    others: NotRequired[dict[str, float]]
    """Other metrics of the evaluation by name, such as `accuracy`; left out where there are none."""


class Checkpoint(TypedDict):
    """A complete checkpoint on disk."""

    object: Literal["fine_tuning.job.checkpoint"]
    """Always `fine_tuning.job.checkpoint`."""
    id: str
    """`<job>/step-00000500`: what `resume_from` of another job takes."""
    created_at: int
    """Unix time, seconds."""
    fine_tuning_job_id: str
    """Whose it is."""
    fine_tuned_model_checkpoint: str
    """Its folder, which begins with the name of the runs folder."""
    step_number: int
    """Optimizer steps done."""
    metrics: CheckpointMetrics
    bytes: int
    """Size of all its files."""
    best: bool
    """Whether it has the lowest validation loss of those on disk: it is kept, however old it gets."""
    path: str
    """Relative to the run directory: download it from `/jobs/{job}/files/{path}`."""


class CheckpointList(Page):
    """Checkpoints, newest first."""

    data: list[Checkpoint]
    first_id: str | None
    """Id of the first one; null for an empty list."""
    last_id: str | None
    """Id of the last one."""


class RunFile(TypedDict):
    """A file of a run directory."""

    object: Literal["file"]
    """Always `file`."""
    path: str
    """Relative to the run directory: download it from `/jobs/{job}/files/{path}`."""
    bytes: int
    """Its size."""
    modified_at: float
    """Unix time, seconds."""


class RunFileList(Page):
    """Files in order of path."""

    data: list[RunFile]
    first_id: str | None
    """Path of the first one; null for an empty list."""
    last_id: str | None
    """Path of the last one."""


class Export(TypedDict):
    """One format of a model: there, being made, or refused."""

    object: Literal["export"]
    """Always `export`."""
    format: ExportFormat
    """`merged`, `adapter`, `ctranslate2` or `gguf`."""
    status: WorkStatus
    """Of what was asked for last; `done` for what is there."""
    phase: Phase | None
    """While it runs: `load`, `save` (it is converted) or `evaluate` (it is compared with the model)."""
    ahead: int | None
    """While it is queued: requests that have their turn before it, at most."""
    error: Fault | None
    """Why it failed, and what was there before is kept; while it is queued, why no worker takes it."""
    path: str | None
    """Folder to download from `/jobs/{job}/files/{path}`; null: none is there."""
    report: ExportReport | None
    """export.json of what is there: types, versions, figures of the verification, files with sha256."""


class ExportList(Page):
    """Exports in order of format."""

    data: list[Export]


class Push(TypedDict):
    """The newest upload of a job to the hub that was asked for."""

    object: Literal["push"]
    """Always `push`."""
    repository: str
    """`org/name`."""
    status: WorkStatus
    """Of the upload."""
    ahead: int | None
    """While it is queued: requests that have their turn before it, at most."""
    error: Fault | None
    """Why it failed: repeating it uploads only what is missing; while it is queued, why no worker takes it."""


class Trial(TypedDict):
    """One of the trials of a sweep."""

    object: Literal["sweep.trial"]
    """Always `sweep.trial`."""
    number: int
    """0, 1, 2 …"""
    status: TrialStatus
    """`running` until all its jobs have ended; `paused`: one of them rests; `pruned`: stopped early, for others were
    better."""
    settings: Settings
    """By the dotted key of the job."""
    jobs: list[str]
    """A job for each seed; none where the settings make no valid job."""
    gone: list[str]
    """Those of its jobs that trained a model which is no longer there: the sweep keeps that of the best trial alone
    (`keep_models`), or the job was deleted."""
    value: float | None
    """Of the sweep's metric, the mean over the jobs; of a pruned trial that of the evaluation by which it was stopped;
    null without one."""
    values: list[float]
    """Of each job that succeeded, where all did."""
    started_at: int
    """When its settings were chosen."""
    finished_at: int | None
    """When the last of its jobs had ended."""
    seconds: float
    """Time in attempts, all jobs together, once it has ended."""
    message: str | None
    """Why it was pruned; or why it is paused, and what to do."""
    error: Fault | None
    """Why it failed."""


class TrialList(Page):
    """All trials, by number."""

    data: list[Trial]


class Sweep(TypedDict):
    """Many trials of one job, and which of them is the best."""

    id: str
    """`sweep-…`; ids sort by time."""
    object: Literal["sweep"]
    """Always `sweep`."""
    name: str
    """As in the specification."""
    status: SweepStatus
    """`running` until no trial is open and none follows; `failed`: too many trials in a row failed with one cause, or
    none has succeeded."""
    reason: Ending | None
    """Why it ended: `done`, `max_hours`, `failures` or `cancelled`."""
    cancel_requested: bool
    """Whether it was cancelled, and its trials may still be stopping."""
    created_at: int
    """When it was submitted."""
    finished_at: int | None
    """When it ended."""
    metric: str
    """By what trials are compared."""
    direction: Literal["minimize", "maximize"]
    """Whether less or more of it is better."""
    sampler: str
    """As in the specification."""
    pruning: str
    """As in the specification."""
    max_trials: int
    """Trials at most."""
    parameters: list[str]
    """The keys of `space`, in order."""
    trials: dict[str, int]
    """How many, by status."""
    best: Trial | None
    """The best that has succeeded so far."""
    importances: dict[str, float]
    """How much of the differences between trials each parameter explains, together 1; provisional until it has ended,
    from ten trials on; empty where too few succeeded."""
    waiting: str | None
    """Why no other trial starts now, and what to do; null where one may, and once all were made."""
    error: Fault | None
    """Why it failed; while it runs, nothing."""
    warnings: list[str]
    """What is worth knowing about the specification."""
    specification: JsonObject
    """The specification, with every default."""


class SweepList(Page):
    """Newest first."""

    data: list[Sweep]
    first_id: str | None
    """Id of the first one; null if there is none."""
    last_id: str | None
    """Id of the last one, for `after` of the next page."""


class DeletedSweep(TypedDict):
    """It is gone, with the jobs of its trials."""

    id: str
    """Which."""
    object: Literal["sweep"]
    """Always `sweep`."""
    deleted: Literal[True]
    """Always true."""


class Dataset(TypedDict):
    """An uploaded file of rows. A job names it `dataset:<name>`."""

    object: Literal["dataset"]
    """Always `dataset`."""
    name: str
    """As it was uploaded; other content needs another name."""
    uri: str
    """How a job names it in `data.train` or `data.validation`: `dataset:<name>`."""
    format: FileFormat
    """What its ending says."""
    bytes: int
    """Its size."""
    sha256: str
    """Of its content, in hexadecimal."""
    created_at: int
    """When it was uploaded, Unix seconds."""


class DatasetDetail(Dataset):
    """A data set, and what became of it."""

    jobs: list[str]
    """Ids of jobs that name it, newest first, at most ten."""
    in_use: bool
    """Whether an open job needs it: it cannot be deleted while there is one."""
    report: DatasetReport | None
    """What the newest job that read it found in its rows (`dataset.json`); null before the first."""
    report_job: str | None
    """That job."""


class DatasetList(Page):
    """Data sets in order of name."""

    data: list[Dataset]
    first_id: str | None
    """Name of the first one; null for an empty list."""
    last_id: str | None
    """Name of the last one."""


class DeletedDataset(TypedDict):
    """It is gone."""

    name: str
    """Which one it was."""
    object: Literal["dataset"]
    """Always `dataset`."""
    deleted: Literal[True]
    """Always true."""


class Generation(TypedDict):
    """What a model, and where it was asked for the one before training, answered."""

    object: Literal["generation"]
    """Always `generation`."""
    job: str
    """Whose model it is."""
    checkpoint: str | None
    """Whose weights answered; null: those of the delivered model."""
    outputs: list[Output]
    """Of each input, in order; beside the trained model's that of the base model, where it was asked for."""
    device: Literal["cpu", "cuda"]
    """Where the model ran."""
    why: str | None
    """Why it was the CPU; null on a GPU."""
    seconds: float
    """Of generating, without waiting and loading."""
    loading_s: float
    """Of loading the model for this request; 0: it was there."""
    tokens_per_s: float | None
    """Null where none was written."""
    seed: int | None
    """That sampling began with; null: nothing was drawn."""


class WorkerList(Page):
    """Workers by name."""

    data: list[Worker]
    damaged: list[str]
    """Ids of jobs whose run directory cannot be read, oldest first: no worker takes them."""
