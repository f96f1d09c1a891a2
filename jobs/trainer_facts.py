"""What a fact about a job is, and the facts that its trainer tells: on memory, the model, scores and checkpoints.

Those of the job and its attempts are in `jobs/events.py`, as are the numbered events that facts become.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from jobs.errors import StageError
from jobs.evaluation_metrics import EvaluationMetric, is_of_texts, metric_figure, metric_words
from jobs.frozen import Frozen, left_out
from jobs.memory_plan import describe
from jobs.plan import StepLimit, limit_text
from jobs.reasons import Reason
from jobs.text.units import bytes_alike, bytes_by_name, capitalized, format_bytes, format_duration, format_share
from jobs.verdict import Base, BaseDifference, ConfidenceInterval, Verdict


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


class Sample(Frozen):
    """One generated text beside what the data has."""

    input: str
    """What the model was given."""
    target: str
    """What the data has."""
    generated: str
    """What the model wrote; of a classifier the label that it finds most probable, or those more probable than not;
    of a regression its score."""
    probability: float | SkipJsonSchema[None] = left_out()
    """Of that label; left out where there is none, or may be several."""

    @property
    def answer(self) -> str:
        """What the model wrote, for people: a label with its probability."""
        return self.generated if self.probability is None else f"{self.generated} ({format_share(self.probability)})"


class EvaluationFinished(Fact):
    """The model was looked at on validation rows."""

    type: Literal["evaluation.finished"] = "evaluation.finished"
    by_trainer: ClassVar[bool] = True
    step: int
    """Optimizer steps done."""
    loss: float
    """Mean negative log likelihood of a target token (of a classifier: of a row), nats; of a regression the
    mean squared error."""
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
    """Of a classifier: the figure of `judged_by`, less that of always answering the commonest class of these rows; of
    a regression, their mean score."""
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


TrainerFact = (
    DeviceWaiting | MemoryPlanned | ModelLoaded | MemoryMeasured | EvaluationFinished | CheckpointSaved
    | CheckpointRejected | DiskLow | OomRecovered
    | UpdateSkipped | StepsCorrected
)  # fmt: skip
"""All of them."""
