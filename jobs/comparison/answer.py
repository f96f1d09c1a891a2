"""The answer of a comparison. Lists of values, bytes and seconds are in the order of `jobs`."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import JsonValue

from jobs.frozen import Frozen
from jobs.memory_plan import OptimizerName
from jobs.state import Status
from jobs.text.units import format_bytes, format_number
from jobs.trainer_facts import Fault
from jobs.verdict import ConfidenceInterval

GroupName = Literal["data", "model", "memory", "training", "versions", "gpu", "outcome"]
FEWEST, MOST = 2, 10
"""Jobs in a comparison."""


class Difference(Frozen):
    """Something that is not the same in all jobs."""

    key: str
    """Of the job file (`data.max_tokens`), of plan.json (`resolved.micro_batch`), or of what was seen
    (`model.dtype`, `metrics.mfu`)."""
    origin: Literal["job", "plan", "run"]
    """`job`: it was asked for. `plan`: check and prepare found it, or decided it. `run`: it came of the run."""
    values: list[JsonValue]
    """Of each job. Null: not set (`job`), or not known of this job."""
    intervals: list[ConfidenceInterval | None] | None = None
    """Of a figure of evaluations: in which that of each job lies with 95 % confidence. Null: not known, as is null in
    place of the list."""
    bytes: list[int | None] | None = None
    """How many bytes more than in the reference the predicted peak has because of this alone; null for a job without a
    plan of its memory. Of the peak and its categories (`memory.parts.…`) themselves: how many bytes they have more.
    Null in place of the list: it is not known to cost any."""
    seconds: list[float | None] | None = None
    """The same for the expected time of all steps, on a GPU."""

    def text(self, place: int) -> str:
        """The value of a job for people, with its interval."""
        found, between = value_text(self.key, self.values[place]), self.intervals and self.intervals[place]
        if not between:
            return found
        return f"{found} ({value_text(self.key, between.low)} to {value_text(self.key, between.high)})"


class DifferenceGroup(Frozen):
    """Differences of one kind."""

    name: GroupName
    """Which kind."""
    differences: list[Difference]
    """What costs most memory first; then as in the job file."""


class SharedCost(Frozen):
    """What several differences cost together: the plan does not say which of them how much."""

    keys: list[str]
    """Their keys."""
    bytes: list[int | None]
    """More than in the reference."""


class CauseLine(Frozen):
    """A difference that makes a job need more memory than the reference, or less, or leaves it less."""

    key: str
    """As in `Difference`."""
    text: str
    """For people, such as `data.max_tokens is 2,048, not 512`."""
    bytes: int
    """How many bytes more; negative: fewer."""
    parts: dict[str, int]
    """Of these by category of the plan (`weights`, `gradients`, `optimizer`, `activations`, `temporaries`, `context`);
    `limit`: by so much less it may use."""
    estimated: bool
    """What it costs together with others is exact, its share of that an estimate."""


class SharedCause(Frozen):
    """What several differences cost together."""

    keys: list[str]
    """Their keys."""
    bytes: int
    """How many bytes more; negative: fewer."""
    parts: dict[str, int]
    """Of these by category."""


class Cause(Frozen):
    """Why the memory of a job did not suffice, where that of the reference did."""

    job: str
    """Its id."""
    text: str
    """For people, in one or two sentences."""
    bytes: int
    """By how many bytes more the job needs, and less it may use, than the reference: the sum of the lines, of what
    several cost together, and of `unexplained_bytes`."""
    lines: list[CauseLine]
    """What costs most first."""
    together: list[SharedCause]
    """What cannot be told apart."""
    unexplained_bytes: int
    """What no difference explains."""


class PlannedMemory(Frozen):
    """What the plan of a job predicts, for a bar. Sizes are bytes."""

    optimizer: OptimizerName
    """Of the setting that was chosen; of a job that was refused, of the smallest that it allows."""
    activation_checkpointing: int
    """Activations of every n-th layer are recomputed; 0: none."""
    micro_batch: int
    """Rows of the longest shape."""
    parts: dict[str, int]
    """By category, at the peak."""
    peak_bytes: int
    """Their sum."""
    limit_bytes: int
    """What the peak may reach: the budget less a margin."""
    fits: bool
    """Whether it does not exceed that."""
    measured_bytes: int | None
    """Peak of the first step of the newest attempt; null: none was measured."""


class ComparedJob(Frozen):
    """One of the jobs."""

    id: str
    """Id of the job."""
    name: str
    """Shown wherever the job is; need not be unique."""
    status: Status
    """Where it stands."""
    error: Fault | None
    """Why it failed, or is paused by itself."""
    memory: PlannedMemory | None
    """Null: it was never planned."""


class SeedRuns(Frozen):
    """Jobs that differ in `training.seed` alone."""

    jobs: list[str]
    """Their ids."""
    seeds: list[int]
    """Of each."""
    n: int
    """How many of them have a final loss."""
    mean: float | None
    """Of their final losses, nats per target token (of a classifier: per row; of a regression squared errors); null:
    there is none."""
    standard_deviation: float | None
    """Of the same, as a sample; null below two."""


class Comparison(Frozen):
    """What differs between jobs. The reference is the first that did not lack memory; costs are counted from it."""

    object: Literal["comparison"] = "comparison"
    """Always `comparison`."""
    reference: str
    """Its id."""
    jobs: list[ComparedJob]
    """In the order asked for."""
    causes: list[Cause]
    """For each job whose memory did not suffice, where that of the reference did."""
    groups: list[DifferenceGroup]
    """Only groups that have differences: the order is that in which causes are usually found."""
    shared: list[SharedCost]
    """What several differences cost together."""
    labels: list[Difference]
    """Names, metadata, priority and integrations: they explain nothing."""
    equal: int
    """Settings of the job file, labels aside, that are the same in all jobs."""
    seeds: list[SeedRuns]
    """Jobs that differ in their seed alone, where there are any."""


def value_text(key: str, value: JsonValue) -> str:
    """A value for people: sizes as such, nothing as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool | str | list | dict):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if key.endswith("_bytes") or key.startswith("memory.parts."):
        return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else format_number(value)
