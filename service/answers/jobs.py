"""A job, as everybody sees it."""

from __future__ import annotations

from typing import Literal

from jobs.attempt import Phase
from jobs.dataset_report import PreparedSummary
from jobs.events import Fault
from jobs.frozen import Empty
from jobs.plan import CheckSummary, StepLimit
from jobs.reasons import Reason
from jobs.spec import JobSpec, Method
from jobs.state import Requested, Stage
from jobs.verdict import ConfidenceInterval, Verdict
from service.answers.parts import Answer, Page

ShownStatus = Literal[
    "validating", "queued", "running", "paused", "succeeded", "failed", "cancelled", "validated", "damaged"
]  # fmt: skip
"""Every state, and damaged."""


class Hyperparameters(Answer):
    """OpenAI's three, from `spec.training`; null with it."""

    n_epochs: int | None
    """Passes over all rows."""
    batch_size: int | None
    """Rows of one optimizer step."""
    learning_rate: float | None
    """Peak learning rate. Absolute: OpenAI's `learning_rate_multiplier` would need a base that only they know."""


class Progress(Answer):
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
    """Mean negative log likelihood of a target token (of a classifier: of a row), nats."""
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


class JobActivity(Answer):
    """What the process of a job does now."""

    phase: Phase
    """`load`, `compile`, `step`, `evaluate` and so on; `wait`: it waits for its GPU."""
    words: str
    """The phase for people, such as `loading the model`."""
    since: float
    """When it began, Unix seconds."""
    fraction: float | None
    """How far it is, 0 to 1; null: not known."""


class JobGpu(Answer):
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


class Job(Answer):
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
    """Validation loss before the first step, nats per target token (of a classifier: per row); null where nothing is
    trained."""
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
    plan: CheckSummary | Empty
    """What it will need, in short: steps, time, memory; in full at `/jobs/{job}/plan`. Empty before it is checked."""
    data: PreparedSummary | Empty
    """What was found in the rows: kept, rejected, cut, lengths. Empty before it is prepared."""
    run_dir: str
    """Folder of everything that is known of it."""
    event_number: int
    """Number of its newest event: the version of this answer."""
    spec: JobSpec | None
    """The specification, with every default; null if it is damaged and unknown."""


class JobList(Page):
    """Jobs, newest first."""

    cursor = "id"
    data: list[Job]
    first_id: str | None
    """Id of the first one; null for an empty list."""
    last_id: str | None
    """Id of the last one: `after` of the next page."""


class Repaired(Answer):
    """What was done to a damaged job."""

    object: Literal["fine_tuning.job.repair"]
    """Always `fine_tuning.job.repair`."""
    message: str
    """What was damaged, and what is lost."""
    backups: list[str]
    """Names of the copies of damaged files, in its run directory."""
    job: Job


class DeletedJob(Answer):
    """It is gone, and its run directory with it."""

    id: str
    """Which one it was."""
    object: Literal["fine_tuning.job"]
    """Always `fine_tuning.job`."""
    deleted: Literal[True]
    """Always true."""
