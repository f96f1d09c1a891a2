"""Events: numbered facts about a job. A closed set of frozen types with past-tense names.

Rows of metrics are in `jobs/metrics.py`, the lines of an attempt file in `jobs/attempt.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, TypeAdapter
from pydantic.json_schema import SkipJsonSchema

from jobs.dataset_report import PreparedSummary
from jobs.errors import StageError
from jobs.evaluation_metrics import EvaluationMetric, chosen_text, is_of_texts, metric_figure, metric_words
from jobs.frozen import Frozen, left_out
from jobs.memory_plan import MemorySummary, describe
from jobs.plan import CheckSummary, StepLimit, TimeSummary, limit_text
from jobs.reasons import Reason
from jobs.state import Requested
from jobs.text.units import (
    bytes_alike,
    bytes_by_name,
    capitalized,
    format_bytes,
    format_duration,
    format_figure,
    format_share,
)
from jobs.verdict import Base, BaseDifference, ConfidenceInterval, Verdict, measured


class Fault(Frozen):
    """Why something failed: `code` for machines, `message` for people, `hint` for what to do."""

    code: str
    """Stable, for machines."""
    message: str
    """For people: what, the value, and what to do."""
    hint: str | None = None
    """Only what to do; null if unknown."""
    param: str | None = None
    """Dotted key of the job file that is wrong; null if it is none of them."""

    @property
    def text(self) -> str:
        """The message, and what to do."""
        return f"{self.message} ({self.hint})" if self.hint else self.message

    @classmethod
    def of(cls, reason: Reason, details: str = "", hint: str | None = None) -> Fault:
        """The sentence of a reason followed by `details`; with its hint, or else `hint`."""
        return cls(code=reason.value, message=f"{reason.sentence}{details}", hint=reason.hint or hint)

    @classmethod
    def raised(cls, error: StageError) -> Fault:
        """What an error says."""
        return cls(code=error.detail_code, message=str(error), hint=error.hint, param=error.param)


def _needed(planned: TimeSummary | MemorySummary | None) -> str:
    """What a run needs."""
    return f"; {planned.text}" if planned and planned.text else ""


Level = Literal["info", "warn", "error"]
"""How loud an event is, in OpenAI's words: for API, page and log."""


class Fact(Frozen):
    """What happened, and its words for people: API, page, command line, chat and log have them from here. The envelope
    (`Event`) says when, to which attempt, and as which number."""

    type: str
    by_trainer: ClassVar[bool] = False

    @property
    def level(self) -> Level:
        """How loud it is."""
        return "info"

    @property
    def title(self) -> str:
        """In a few words, behind the name of the job."""
        return self.type.removeprefix("job.").replace(".", " ").replace("_", " ")

    @property
    def details(self) -> dict[str, str]:
        """Its figures by name, where a message shows them one by one."""
        return {}

    @abstractmethod
    def sentence(self, attempt: int) -> str:
        """In plain words, with the figures that matter. `attempt`: the one that it belongs to."""


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


class DeviceWaiting(Fact):
    """The attempt waits for the GPU; or the queued job: its attempt lost it, or no train worker has a usable one."""

    type: Literal["device.waiting"] = "device.waiting"
    by_trainer: ClassVar[bool] = True
    message: str
    """Why."""
    memory_of_host: bool = False
    """It waits for memory of the host, which others have, and not for the GPU."""
    available: bool = False
    """A train worker has a GPU for the job again: it waits for its turn alone."""

    @property
    def level(self) -> Level:
        return "warn"

    @property
    def title(self) -> str:
        return "waits for its turn" if self.available else "waits for a GPU"

    def sentence(self, attempt: int) -> str:
        what = "memory of the host" if self.memory_of_host else "the GPU"
        return f"waiting for {what}: {self.message}"


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


class ModelLoaded(Fact):
    """The model is in memory, once, and has passed the guards."""

    type: Literal["model.loaded"] = "model.loaded"
    by_trainer: ClassVar[bool] = True
    parameters: int
    """How many weights."""
    parameter_bytes: int
    """Their size."""
    dtype: str
    """Their type, such as `bfloat16`."""
    device: str
    """Where they are, such as `cuda:0`."""
    seconds: float
    """What loading took."""
    peak_ratio: float
    """Peak memory while loading / bytes of the parameters."""
    resumed_step: int | None = None
    """Step of the checkpoint that the attempt resumes from; null: from the start."""
    compiled: bool = False
    """Layers run compiled; false where the plan says so, and where compiling failed (the trainer's log says why)."""

    def sentence(self, attempt: int) -> str:
        begin = f"resuming from step {self.resumed_step:,}" if self.resumed_step is not None else "from the start"
        return (
            f"model loaded once: {self.parameters:,} parameters, {self.dtype} on {self.device} "
            f"in {format_duration(self.seconds)}, {begin}"
        )


class GpuProcess(Frozen):
    """A process that computes on a GPU. In a container pid and name are those that the driver shows there."""

    pid: int
    """Its number."""
    name: str | None = None
    """Its program; null where the driver does not show it."""
    memory_bytes: int | None = None
    """What it holds; null where the driver does not show it."""


class MemoryPlanned(Fact):
    """What this attempt trains with, once the GPU was looked at."""

    type: Literal["memory.planned"] = "memory.planned"
    by_trainer: ClassVar[bool] = True
    micro_batch: int
    """Rows of the longest shape."""
    activation_checkpointing: int
    """Activations of every n-th layer are recomputed; 0: none."""
    optimizer: str
    """`adamw`, `adamw_offload`, `adamw_8bit` or `adafactor`."""
    peak_bytes: int
    """Predicted, CUDA context included."""
    budget_bytes: int
    """What the attempt may use."""
    other_processes_bytes: int | None = None
    """What other processes hold of the GPU; null if unknown."""
    other_processes: list[GpuProcess] = Field([])
    """Those of them that the driver shows."""
    changed: str | None = None
    """Why this is not what plan.json says; null where it is."""
    evaluation: bool = False
    """The model is evaluated and not trained: there is no optimizer, whatever `optimizer` says."""

    def sentence(self, attempt: int) -> str:
        held = self.other_processes_bytes or 0
        peak, budget, by_others = bytes_alike(self.peak_bytes, self.budget_bytes, held)
        others = f", {by_others} held by other processes" if held else ""
        changed = f"; not as planned: {self.changed}" if self.changed else ""
        setting = describe(self.optimizer, self.activation_checkpointing, self.micro_batch)
        if self.evaluation:
            setting = f"evaluation, micro-batch {self.micro_batch}"
        return f"peak memory {peak}; budget {budget}{others}; {setting}{changed}"


class MemoryMeasured(Fact):
    """The peak of the attempt's first step, beside what was predicted for that very step."""

    type: Literal["memory.measured"] = "memory.measured"
    by_trainer: ClassVar[bool] = True
    step: int
    """The step."""
    measured_bytes: int
    """Its peak."""
    predicted_bytes: int
    """As predicted for its shapes."""
    peak_bytes: int
    """Of the largest micro-batch that can come, by the prediction corrected with this measurement."""
    budget_bytes: int
    """What the attempt may use."""

    def sentence(self, attempt: int) -> str:
        measured, predicted, peak, budget = bytes_alike(
            self.measured_bytes, self.predicted_bytes, self.peak_bytes, self.budget_bytes
        )
        return (
            f"step {self.step:,}: {measured} at the peak, {predicted} predicted; at most {peak} expected, of {budget}"
        )


class EvaluationFinished(Fact):
    """The model was looked at on validation rows."""

    type: Literal["evaluation.finished"] = "evaluation.finished"
    by_trainer: ClassVar[bool] = True
    step: int
    """Optimizer steps done."""
    loss: float
    """Mean negative log likelihood of a target token (of a classifier: of a row), nats."""
    rows: int
    """Rows looked at."""
    text_rows: int | None = None
    """Those of them whose generated texts are scored, which the metrics of generated texts are over; null in events of
    earlier versions."""
    bleu_of_characters: bool = False
    """`bleu` is of characters, because most letters of the targets are of scripts without spaces; else of words."""
    seconds: float
    """What it took."""
    best: bool
    """Whether this is the best so far by `checkpoint.best`, or by the loss where that is null; false where nothing is
    trained."""
    samples: list[Sample] = Field([])
    """Texts generated."""
    metrics: dict[str, float] = Field({})
    """The other metrics (`evaluation.metrics`), by name."""
    intervals: dict[str, ConfidenceInterval] = Field({})
    """Of `loss` and the metrics, by name: in which they lie with 95 % confidence. Empty in events of earlier versions,
    as are those that follow, and without those of too few rows."""
    against_base: dict[str, BaseDifference] = Field({})
    """The same less those before step 1, of the same rows; empty where there is no such evaluation."""
    judged_by: str | None = None
    """The metric of these that says whether the model is better than before training."""
    base: Base | None = None
    """What the model before step 1 was; null in events of earlier versions."""
    against_commonest: BaseDifference | None = None
    """Of a classifier: the figure of `judged_by`, less that of always answering the commonest class of these rows."""
    generated_texts: int = 0
    """Rows that the model wrote a text for: those of `text_rows` and of `samples`. 0 for a classifier."""
    empty_texts: int = 0
    """Those of them that are empty."""

    @property
    def figures(self) -> dict[str, float]:
        """The loss and the metrics, by name."""
        return {EvaluationMetric.LOSS.value: self.loss, **self.metrics}

    @property
    def untrained(self) -> bool:
        """Whether it is that of a job of kind `evaluate`: of a run, the model before step 1 is the best so far."""
        return not self.step and not self.best

    @property
    def figures_text(self) -> str:
        """The same for people, with the rows that they are over."""
        of_texts = {name: value for name, value in self.metrics.items() if is_of_texts(name)}
        others = {name: value for name, value in self.figures.items() if name not in of_texts}
        text = f"{self._text(others)} over {self.rows:,} rows"
        if not of_texts:
            return text
        count = "" if self.text_rows is None else f"{self.text_rows:,} "
        shown, rest = self._telling(of_texts)
        return f"{text}, {shown} over {count}generated texts{f' ({rest})' if rest else ''}"

    @property
    def verdict(self) -> Verdict | None:
        """Whether the model is better than before training; None: it is the model before training, or of an earlier
        version."""
        name = self.judged_by
        if name is None or name not in self.figures or not self.step:
            return None
        compared = self.against_base
        if self.base is None:  # an earlier version, which judged so
            compared = {key: compared[key] for key in (name, EvaluationMetric.LOSS.value) if key in compared}
        return Verdict.of(
            name,
            self.figures[name],
            self.intervals.get(name),
            compared,
            base=self.base or "pretrained",
            against_commonest=self.against_commonest,
            all_empty=self.empty_texts if self.empty_texts == self.generated_texts else 0,
        )

    @property
    def metrics_text(self) -> str:
        """The metrics for people, the one that judges first, such as `macro F1 0.8934, accuracy 0.9012`."""
        return ", ".join(filter(None, self._telling(self.metrics)))

    def words(self, name: str) -> str:
        """Of a metric, for people."""
        of_characters = self.bleu_of_characters and name == EvaluationMetric.BLEU
        return metric_words(name) + (" of characters" if of_characters else "")

    def _telling(self, figures: Mapping[str, float]) -> tuple[str, str]:
        """The figures, the one that judges first; and of those beside the first that are 0, and were 0 before
        training, only how many there are."""
        first, *others = sorted(figures, key=lambda name: name != self.judged_by)
        nothing = [name for name in others if self._is_nothing(name, figures[name])]
        nothing = nothing if len(nothing) > 1 else []
        shown = self._text({name: figures[name] for name in (first, *others) if name not in nothing})
        return shown, f"{len(nothing)} other metrics are 0" if nothing else ""

    def _is_nothing(self, name: str, value: float) -> bool:
        base = self.against_base.get(name)
        return not value and not (base and base.difference)

    def _text(self, figures: Mapping[str, float]) -> str:
        return ", ".join(f"{self.words(name)} {metric_figure(name, value)}" for name, value in figures.items())

    def sentence(self, attempt: int) -> str:
        best = ", the best so far" if self.best else ""
        judged = f"; {self.verdict.text}" if self.verdict is not None else ""
        evaluated = "evaluated" if self.untrained else f"step {self.step:,}"
        return f"{evaluated}: {self.figures_text}{best}{judged}"


class Sample(Frozen):
    """One generated text beside what the data has."""

    input: str
    """What the model was given."""
    target: str
    """What the data has."""
    generated: str
    """What the model wrote; of a classifier the label that it finds most probable, or those more probable than not."""
    probability: float | SkipJsonSchema[None] = left_out()
    """Of that label; left out where there is none, or may be several."""

    @property
    def answer(self) -> str:
        """What the model wrote, for people: a label with its probability."""
        return self.generated if self.probability is None else f"{self.generated} ({format_share(self.probability)})"


class CheckpointSaved(Fact):
    """A checkpoint is on disk, complete and verified."""

    type: Literal["checkpoint.saved"] = "checkpoint.saved"
    by_trainer: ClassVar[bool] = True
    step: int
    """Optimizer steps done."""
    path: str
    """Relative to the run directory."""
    bytes: int
    """Its size."""
    seconds: float
    """What saving took."""
    validation_loss: float | None = None
    """Of exactly these weights; null where they were not evaluated."""

    def sentence(self, attempt: int) -> str:
        size, seconds = format_bytes(self.bytes), format_duration(self.seconds)
        return f"step {self.step:,}: checkpoint saved ({size} in {seconds})"


class CheckpointRejected(Fact):
    """A checkpoint did not verify and was passed over; another one is used."""

    type: Literal["checkpoint.rejected"] = "checkpoint.rejected"
    by_trainer: ClassVar[bool] = True
    path: str
    """Relative to the run directory."""
    message: str
    """What is wrong with it."""

    def sentence(self, attempt: int) -> str:
        return f"{self.path} did not verify and was skipped: {self.message}"

    @property
    def level(self) -> Level:
        return "warn"


class DiskLow(Fact):
    """A save was skipped for want of room; training continues."""

    type: Literal["disk.low"] = "disk.low"
    by_trainer: ClassVar[bool] = True
    step: int
    """Optimizer steps done."""
    free_bytes: int
    """Room on the disk."""
    needed_bytes: int
    """What the checkpoint needs."""

    @property
    def level(self) -> Level:
        return "warn"

    @property
    def title(self) -> str:
        return "the disk is nearly full"

    @property
    def details(self) -> dict[str, str]:
        free, needed = bytes_alike(self.free_bytes, self.needed_bytes)
        return {"Free": free, "Needed": needed}

    def sentence(self, attempt: int) -> str:
        free, needed = bytes_alike(self.free_bytes, self.needed_bytes)
        return (
            f"step {self.step:,}: checkpoint skipped, the disk is too full for it ({free} free, {needed} needed); "
            "training continues"
        )


_SHORTAGES = {
    "fragmentation": "free memory was too fragmented",
    "other_processes": "other processes hold memory of the GPU",
    "exhausted": "the step needs more memory than there is",
}
"""Why memory ran out."""


class OomRecovered(Fact):
    """Memory ran out inside a step; the same step was redone in smaller micro-batches. Nothing was lost."""

    type: Literal["oom.recovered"] = "oom.recovered"
    by_trainer: ClassVar[bool] = True
    step: int
    """The step that was redone."""
    micro_batch_before: int
    """Rows of the longest shape, in this length bucket."""
    micro_batch_after: int
    """The same as before where clearing the cache, or waiting, was enough."""
    message: str
    """What the allocator said."""
    milliseconds_lost: float
    """What the first try had taken."""
    cause: Literal["fragmentation", "other_processes", "exhausted"] | None = None
    """Free memory in pieces too small; another process on the GPU; really too much. This and what follows: null in
    events of earlier versions, and where it cannot be known."""
    bucket: str | None = None
    """Lengths of the micro-batch that failed, such as `input ≤ 256, target ≤ 512`; later ones like it are cut alike."""
    requested_bytes: int | None = None
    """What was asked for when it ran out."""
    allocated_bytes: int | None = None
    """What tensors held then."""
    reserved_bytes: int | None = None
    """What the allocator held then."""
    other_processes_bytes: int | None = None
    """What other processes hold of the GPU."""
    report: str | None = None
    """Folder, relative to the run directory."""

    @property
    def level(self) -> Level:
        return "warn"

    @property
    def title(self) -> str:
        return "out of memory, recovered"

    @property
    def details(self) -> dict[str, str]:
        rows = f"{self.micro_batch_before} → {self.micro_batch_after} rows"
        if self.micro_batch_after == self.micro_batch_before:
            rows = f"{self.micro_batch_before} rows, as before"
        return {
            "Step": f"{self.step:,}",
            "Micro-batch": rows,
            "Time lost": format_duration(self.milliseconds_lost / 1000),
            **({"Cause": capitalized(_SHORTAGES[self.cause])} if self.cause else {}),
            **({"Length bucket": self.bucket} if self.bucket is not None else {}),
            **({"Memory": " · ".join(sizes)} if (sizes := bytes_by_name(self._sizes)) else {}),
        }

    @property
    def _sizes(self) -> dict[str, int | None]:
        return {
            "requested": self.requested_bytes,
            "allocated": self.allocated_bytes,
            "reserved": self.reserved_bytes,
            "held by other processes": self.other_processes_bytes,
        }

    def sentence(self, attempt: int) -> str:
        cause = f": {_SHORTAGES[self.cause]}" if self.cause else ""
        known = {"reserved": None, "held by other processes": self.other_processes_bytes or None}
        sizes = bytes_by_name({**self._sizes, **known})
        figures = f" ({', '.join(sizes)})" if sizes else ""
        how = f"micro-batches of {self.micro_batch_after} instead of {self.micro_batch_before}"
        if self.micro_batch_after == self.micro_batch_before:
            how = f"the same micro-batches of {self.micro_batch_before}"
        bucket = f" ({self.bucket})" if self.bucket else ""
        return (
            f"step {self.step:,}: memory ran out{cause}{figures}; the step was redone with {how}{bucket}, "
            f"at a cost of {format_duration(self.milliseconds_lost / 1000)}"
        )


class UpdateSkipped(Fact):
    """The gradients of a step overflowed beside a model in float16: its update was skipped, and its rows count as seen.
    A few of these are part of such a run."""

    type: Literal["update.skipped"] = "update.skipped"
    by_trainer: ClassVar[bool] = True
    step: int
    """The step; the weights after it are those before it."""
    loss_scale: float
    """What its loss was multiplied by for the backward pass."""
    next_loss_scale: float
    """The same of the next step."""

    def sentence(self, attempt: int) -> str:
        return (
            f"step {self.step:,}: update skipped, gradients overflowed float16 at a loss scale of "
            f"{self.loss_scale:,.0f}; it is now {self.next_loss_scale:,.0f}"
        )


class StepsCorrected(Fact):
    """The number of steps of the whole run is another one, for `training.max_hours`: by the measured pace, some times
    in a run; or the run is cut, since it has become so slow that these hours are over."""

    type: Literal["steps.corrected"] = "steps.corrected"
    by_trainer: ClassVar[bool] = True
    step: int
    """Optimizer steps done."""
    steps: int
    """Of the whole run, from now on."""
    steps_before: int
    """Of the whole run, until now."""
    warmup_steps: int
    """Of a run of so many."""
    limited_by: StepLimit
    """What decides their number now."""
    spent_s: float
    """Seconds in attempts of this job so far."""
    step_s: float
    """Seconds of a step, evaluations and checkpoints included, as measured."""
    cut: bool = False
    """The run ends here: its hours are over, before its learning rate has decayed."""

    def sentence(self, attempt: int) -> str:
        if self.cut:
            return (
                f"step {self.step:,}: the run ends here, and not at step {self.steps_before:,}: it has become slower, "
                "and the time of training.max_hours is over"
            )
        return (
            f"step {self.step:,}: {self.steps:,} steps in all{limit_text(self.limited_by)}, by the measured pace of "
            f"{format_duration(self.step_s)} a step; {self.steps_before:,} were planned"
        )


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
    """Validation loss before the first step, nats per target token (of a classifier: per row); null: nothing was
    trained."""
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
    | DeviceWaiting | MemoryPlanned | ModelLoaded | MemoryMeasured | EvaluationFinished | CheckpointSaved
    | CheckpointRejected | DiskLow | OomRecovered
    | UpdateSkipped | StepsCorrected | AttemptEnded | JobPaused | JobResumed | JobRepaired | JobValidated
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


EvaluationFinished.model_rebuild()
any_fact: TypeAdapter[AnyFact] = TypeAdapter(AnyFact)
EVENT_TYPES: tuple[str, ...] = tuple(each.model_fields["type"].default for each in get_args(get_args(AnyFact)[0]))
