"""Events: numbered facts about a job. A closed set of frozen types with past-tense names.

What a fact is, and those that a trainer tells, are in `jobs/trainer_facts.py`; rows of metrics in `jobs/metrics.py`,
the lines of an attempt file in `jobs/attempt.py`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, TypeAdapter

from jobs.dataset_report import PreparedSummary
from jobs.evaluation_metrics import EvaluationMetric, chosen_text
from jobs.frozen import Frozen, left_out
from jobs.memory_plan import MemorySummary
from jobs.plan import CheckSummary, StepLimit, TimeSummary, limit_text
from jobs.reasons import Reason
from jobs.state import Requested
from jobs.text.units import format_duration, format_figure
from jobs.trainer_facts import Fact, Fault, Level, TrainerFact
from jobs.verdict import ConfidenceInterval, Verdict, measured


def _needed(planned: TimeSummary | MemorySummary | None) -> str:
    """What a run needs."""
    return f"; {planned.text}" if planned and planned.text else ""


class JobSubmitted(Fact):
    """Number 1 of every job."""

    type: Literal["job.submitted"] = "job.submitted"
    name: str
    """As in the job."""
    model: str
    """As in the job."""
    spec_sha256: str
    """Of the specification with every default: what checkpoints are bound to."""
    kind: Literal["train", "evaluate"] = "train"
    """As in the job."""
    priority: int = 0
    """As in the job."""
    max_restarts: int = 5
    """As in the job."""
    metadata: dict[str, str] = Field({})
    """As in the job."""
    dry_run: bool = False
    """Only checked, never trained."""
    format_version: int = 1
    """Of the run directory: a version of Longhaul that knows only smaller ones leaves it alone."""
    version: str = ""
    """Of the Longhaul that made it."""
    idempotency_key: str | None = None
    """Of the request; null without one."""
    body_sha256: str | None = None
    """Of the request's body: the same key with another body is refused."""
    discord: bool = True
    """Whether Discord is notified."""
    wandb: bool = True
    """Whether Weights & Biases is notified."""
    cloned_from: str | None = None
    """The job whose specification this one's was made from."""
    sweep: str | None = None
    """The sweep that it is a trial of; null: none."""

    def sentence(self, attempt: int) -> str:
        clone = f", a clone of {self.cloned_from}" if self.cloned_from else ""
        return f"submitted as {self.name!r}, model {self.model}{clone}" + (" (dry run)" if self.dry_run else "")


class JobChecked(Fact):
    """The specification, the paths, the model's config and the first rows are in order."""

    type: Literal["job.checked"] = "job.checked"
    plan: CheckSummary
    """The provisional plan in short."""

    def sentence(self, attempt: int) -> str:
        plan = self.plan
        return (
            f"checked: specification, paths, model and first rows are in order; about {plan.rows_estimated:,} rows "
            f"{f'(read as {plan.read_as}) ' if plan.read_as else ''}"
            f"{f'(from {plan.reading}) ' if plan.reading else ''}"
            + (f"and {plan.steps:,} steps" if plan.steps else "to evaluate the model on")
            + f"{limit_text(plan.limited_by)}{_needed(plan.time)}{_needed(plan.memory)}"
            + (f"; it {plan.resume_from.text}" if plan.resume_from else "")
        )


class Adopted(Frozen):
    """A checkpoint of another job (`resume_from`) that is this job's own now."""

    source: str
    """`job-…/step-00000500`."""
    step: int
    """Optimizer steps done."""
    path: str
    """Relative to the run directory."""
    first_loss: float | None = None
    """Validation loss before step 1 of the whole run; null: it was over other rows, or by an earlier version."""
    best_loss: float | None = None
    """Lowest validation loss up to that step; null as above."""
    passed_over: list[str] = Field([])
    """Checkpoints of the other job that could not be used, and why."""


class JobPrepared(Fact):
    """All rows are validated and tokenized, and the model's files are in the store."""

    type: Literal["job.prepared"] = "job.prepared"
    data: PreparedSummary
    """What was found in the rows. A few KB; in full in `dataset.json` of the run directory."""
    rows_per_epoch: int | None = None
    """Where sources have weights: rows of an epoch. Null: each training row once."""
    steps: int
    """Optimizer steps of the whole run."""
    limited_by: StepLimit = "epochs"
    """What decides their number: the epochs, or a key of `training` that allows fewer."""
    time: TimeSummary | None = None
    """What the run needs."""
    memory: MemorySummary | None = None
    """What it needs at its peak, what was tried and chosen."""
    adopted: Adopted | None = None
    """What the first attempt resumes from; null: it begins at the start."""

    @property
    def title(self) -> str:
        return "planned"

    def sentence(self, attempt: int) -> str:
        adopted = f" (from {self.adopted.source} on)" if self.adopted else ""
        todo = f"{self.steps:,} steps to train{adopted}" if self.steps else "the model is to be evaluated"
        # Checkpoints of the job that it resumes from which could not be used.
        skipped = "".join(f"; skipped: {defect}" for defect in (self.adopted.passed_over if self.adopted else []))
        return (
            f"prepared: {self.data.text(self.rows_per_epoch, trains=self.steps > 0)}{todo}"
            f"{limit_text(self.limited_by)}{_needed(self.time)}{_needed(self.memory)}{skipped}"
        )


class JobUnprepared(Fact):
    """What *prepare* had made is gone or damaged: the job goes back there, which makes the same again."""

    type: Literal["job.unprepared"] = "job.unprepared"
    message: str
    """What is wrong with it."""

    def sentence(self, attempt: int) -> str:
        return f"returned to prepare: {self.message}"

    @property
    def level(self) -> Level:
        return "warn"


class JobQueued(Fact):
    """The job waits for a GPU: for the first time, or again after an attempt ended."""

    type: Literal["job.queued"] = "job.queued"
    not_before_s: float = 0.0
    """Seconds to wait before the next attempt, from the time of this event."""

    def sentence(self, attempt: int) -> str:
        if not self.not_before_s:
            return "waits for its turn"
        wait = format_duration(self.not_before_s)
        return f"waits for its turn; the next attempt starts in {wait} at the earliest"


class JobPauseRequested(Fact):
    """A user wants the running job paused: it saves a checkpoint and stops."""

    type: Literal["job.pause_requested"] = "job.pause_requested"
    requested: ClassVar[Requested] = Requested.PAUSE

    def sentence(self, attempt: int) -> str:
        return "pause requested: the trainer saves a checkpoint and stops"


class JobCancelRequested(Fact):
    """A user wants the running job cancelled."""

    type: Literal["job.cancel_requested"] = "job.cancel_requested"
    requested: ClassVar[Requested] = Requested.CANCEL

    def sentence(self, attempt: int) -> str:
        return "cancel requested: the trainer stops"


class JobPauseWithdrawn(Fact):
    """A user has resumed a job before its pause took effect."""

    type: Literal["job.pause_withdrawn"] = "job.pause_withdrawn"
    requested: ClassVar[Requested] = Requested.NONE

    def sentence(self, attempt: int) -> str:
        return "the pause was withdrawn: the job keeps running"


class JobPriorityChanged(Fact):
    """A user has given the job another priority; while it waits, it waits at another place."""

    type: Literal["job.priority_changed"] = "job.priority_changed"
    priority: int
    """The new one: higher runs first."""

    def sentence(self, attempt: int) -> str:
        return f"the priority is now {self.priority}"


class AttemptStarted(Fact):
    """A supervisor has begun attempt `Event.attempt`; from here on it counts."""

    type: Literal["attempt.started"] = "attempt.started"
    worker: str
    """Its name."""
    box: str | None = None
    """Name of its box; null in events of earlier versions."""
    device: str
    """`cpu` or `cuda`."""
    gpu: str | None = None
    """UUID of the GPU; null: a CPU."""
    gpu_name: str | None = None
    """As its driver names it."""
    engine: str | None = left_out()
    """The engine on whose node it trains; left out: it trains on the worker's own machine."""
    versions: dict[str, str] = Field({})
    """Of `longhaul`, `torch` and `transformers` where the worker is, also if an engine's node trains; and of the GPU's
    `driver`. Empty in events of earlier versions."""

    def sentence(self, attempt: int) -> str:
        box = f" of {self.box}" if self.box else ""
        return f"attempt {attempt} started on {self.gpu_name or self.device}{box} (worker {self.worker})"


class TaskSubmitted(Fact):
    """An engine has taken the attempt, as a task of its own, and decides when it runs."""

    type: Literal["task.submitted"] = "task.submitted"
    engine: str
    """Its name (`resources.engine`)."""
    task: str
    """The engine's id of the task."""

    def sentence(self, attempt: int) -> str:
        return f"handed over to the engine {self.engine}: its task {self.task} waits for its turn there"


class TaskWaiting(Fact):
    """Why the attempt does not run on its engine: it waits there, or the engine did not take it."""

    type: Literal["task.waiting"] = "task.waiting"
    task: str | None
    """The engine's id of the task that waits, or is waited for; null: it is not known."""
    message: str
    """Why, in the engine's words."""

    def sentence(self, attempt: int) -> str:
        return f"waiting on the engine: {self.message}"


class TaskStarted(Fact):
    """The attempt runs on a node of its engine."""

    type: Literal["task.started"] = "task.started"
    task: str
    """The engine's id of the task."""
    node: str
    """Host name of the node."""

    def sentence(self, attempt: int) -> str:
        return f"task {self.task} of the engine runs on {self.node}"


class AttemptEnded(Fact):
    """The trainer process of attempt `Event.attempt` is gone."""

    type: Literal["attempt.ended"] = "attempt.ended"
    reason: Reason
    """How it ended."""
    step: int = 0
    """Optimizer steps done: of a trainer that could not say so itself, those that are known."""
    checkpoint_step: int | None = None
    """Step of the newest checkpoint: another attempt begins there, and trains the steps since then again. 0: there is
    none. Null: an earlier version did not say."""
    exit_code: int | None = None
    """Of the process; null where it is not known."""
    error: Fault | None = None
    """Why; null where nothing is wrong."""

    @property
    def steps_lost(self) -> int:
        """Steps since the newest checkpoint, of an attempt that did not complete the job."""
        if self.checkpoint_step is None or self.reason.completes:
            return 0
        return max(0, self.step - self.checkpoint_step)

    @property
    def where(self) -> str:
        """In words: how far it came, and how much of that has to be done again."""
        at = f"at step {self.step:,}"
        if not self.steps_lost:
            return at
        newest = f"the newest checkpoint is that of step {self.checkpoint_step:,}"
        since = newest if self.checkpoint_step else "there is no checkpoint yet"
        return f"{at} ({since}: {self.steps_lost:,} {'step is' if self.steps_lost == 1 else 'steps are'} lost)"

    @property
    def level(self) -> Level:
        return "info" if self.reason.severity == "info" else "warn"

    def sentence(self, attempt: int) -> str:
        # Nothing but an evaluation is done before step 1.
        at = "" if self.reason is Reason.DONE and not self.step else f" {self.where}"
        why, message = self.reason.sentence, self.error.message if self.error else ""
        if message:  # it may begin with the sentence of the reason
            why = message if message.startswith(why) else f"{why}: {message}"
        return f"attempt {attempt} ended{at}: {why}"


class JobPaused(Fact):
    """The job rests until it is resumed."""

    type: Literal["job.paused"] = "job.paused"
    error: Fault | None = None
    """Why it cannot continue by itself, and what to do; null where a user paused it."""

    @property
    def level(self) -> Level:
        return "info" if self.error is None else "error"

    def sentence(self, attempt: int) -> str:
        return "paused until you resume it" if self.error is None else f"paused: {self.error.text}"


class JobResumed(Fact):
    """A paused job waits for a GPU again."""

    type: Literal["job.resumed"] = "job.resumed"
    from_scratch: bool = False
    """Its next attempt begins at step 0 and removes every checkpoint that it has."""

    def sentence(self, attempt: int) -> str:
        if self.from_scratch:
            return "resumed from scratch: waits for its turn, then starts at step 0 without the earlier checkpoints"
        return "resumed: waits for its turn again"


class JobRepaired(Fact):
    """The damaged end of events.jsonl was cut off. `Event.attempt` is the newest that left a file: no number is used
    again. The numbers of this event and of those after it may have been those of others.
    """

    type: Literal["job.repaired"] = "job.repaired"
    lines_lost: int
    """Lines that were cut off; a copy of the damaged file is in the run directory."""

    def sentence(self, attempt: int) -> str:
        lines = f"its last {self.lines_lost:,} events were" if self.lines_lost > 1 else "its last event was"
        return f"repaired: {lines} cut off, from the damaged one on, after a backup; the job is as it was before them"

    @property
    def level(self) -> Level:
        return "warn"


class JobValidated(Fact):
    """End of a dry run: nothing was wrong."""

    type: Literal["job.validated"] = "job.validated"

    def sentence(self, attempt: int) -> str:
        return "dry run: the job is valid"


class JobSucceeded(Fact):
    """The model is done, or evaluated."""

    type: Literal["job.succeeded"] = "job.succeeded"
    model: str | None
    """Folder relative to the run directory; null: it was evaluated alone."""
    step: int
    """Of the model that was kept."""
    loss: float | None
    """Validation loss of the model that was kept."""
    first_loss: float | None = None
    """Validation loss before the first step, nats per target token (of a classifier: per row; of a regression the mean
    squared error); null: nothing was trained."""
    chosen_by: str | None = None
    """The metric by which its checkpoint is the best. Null: it is the last step's, or an earlier version's."""
    better_step: int | None = None
    """The step whose evaluation was better by that metric, and whose checkpoint is missing: there was no room for it,
    or it was damaged. Null: there is none."""
    kept_from: str | None = None
    """The job (`resume_from`) that trained the model that was kept: no step since was better. Null: this one has."""
    metrics: dict[str, float] = Field({})
    """Other metrics of the model that was kept."""
    intervals: dict[str, ConfidenceInterval] = Field({})
    """Of `loss` and the metrics, by name: in which they lie with 95 % confidence; without those of too few rows."""
    reason: Reason = Reason.DONE
    """Why training ended: `done`, or `early_stopped`."""
    verdict: Verdict | None = None
    """Whether the model that was kept is better than before training; null where it was not evaluated, in another job
    that this one resumes from, or by an earlier version."""
    seconds: float = 0.0
    """Time in attempts, all together."""

    @property
    def measured(self) -> dict[str, str]:
        """The loss and the metrics by their words, for people, with intervals."""
        return measured(self.loss, self.metrics, self.intervals)

    @property
    def chosen_text(self) -> str | None:
        """By what it was chosen, for people, such as `the best by macro F1, 0.8934`; None: by nothing."""
        if self.chosen_by is None:
            return None
        return chosen_text(self.chosen_by, self.loss, self.metrics, self.better_step, self.kept_from)

    @property
    def level(self) -> Level:
        return "warn" if self.verdict is not None and self.verdict.warns else "info"

    @property
    def title(self) -> str:
        headline = None if self.verdict is None else self.verdict.headline
        return f"done, {headline}" if headline else "done"

    def sentence(self, attempt: int) -> str:
        if self.model is None:
            figures = (f"{name} {text}" for name, text in self.measured.items())
            return ", ".join(["succeeded: the model is evaluated", *figures])
        by_loss = self.verdict is not None and self.verdict.metric == EvaluationMetric.LOSS  # which then says it
        loss = "" if self.loss is None or by_loss else f", validation loss {format_figure(self.loss)}"
        judged = f"; {self.verdict.text}" if self.verdict is not None else ""
        chosen = f" ({self.chosen_text})" if self.chosen_text else ""
        early = "ended early, " if self.reason is Reason.EARLY_STOPPED else ""
        return f"succeeded: {early}the model of step {self.step:,}{chosen} is in {self.model}/{loss}{judged}"


class JobFailed(Fact):
    """The job cannot continue; `error` says why and what to do."""

    type: Literal["job.failed"] = "job.failed"
    error: Fault
    """Why, and what to do."""

    @property
    def level(self) -> Level:
        return "error"

    def sentence(self, attempt: int) -> str:
        return f"failed: {self.error.text}"


class JobCancelled(Fact):
    """A user did not want it any more. The newest checkpoint, if there is one, is kept."""

    type: Literal["job.cancelled"] = "job.cancelled"
    checkpoint: str | None = None
    """The newest one, relative to the run directory."""

    def sentence(self, attempt: int) -> str:
        return "cancelled" + (f"; {self.checkpoint} is kept" if self.checkpoint else "")


class ModelRemoved(Fact):
    """The job is a trial of a sweep that keeps the model of its best trial alone, and is not that. Its model and its
    checkpoints are removed after this is on disk.
    """

    type: Literal["job.model_removed"] = "job.model_removed"

    def sentence(self, attempt: int) -> str:
        return "model and checkpoints are removed: its sweep keeps those of its best trial alone"


AnyFact = Annotated[
    JobSubmitted | JobChecked | JobPrepared | JobUnprepared | JobQueued | JobPauseRequested | JobCancelRequested
    | JobPauseWithdrawn | JobPriorityChanged | AttemptStarted | TaskSubmitted | TaskWaiting | TaskStarted
    | TrainerFact | AttemptEnded | JobPaused | JobResumed | JobRepaired | JobValidated
    | JobSucceeded | JobFailed | JobCancelled | ModelRemoved,
    Field(discriminator="type"),
]  # fmt: skip


class Event(Frozen):
    """One line of events.jsonl: a fact with its number, time and attempt."""

    number: Annotated[int, Field(ge=1)]
    """1, 2, 3 … without gap."""
    job: str
    """Id of the job."""
    at: float
    """Unix time, seconds."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """The attempt it belongs to; 0 before the first."""
    fact: AnyFact

    @property
    def type(self) -> str:
        """The fact's name, e.g. `checkpoint.saved`."""
        return self.fact.type

    @property
    def sentence(self) -> str:
        """What happened, in plain words, with the figures that matter."""
        return self.fact.sentence(self.attempt)


any_fact: TypeAdapter[AnyFact] = TypeAdapter(AnyFact)
EVENT_TYPES: tuple[str, ...] = tuple(each.model_fields["type"].default for each in get_args(get_args(AnyFact)[0]))
