"""What of a job's events a page draws: evaluations with their samples, and marks beside the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jobs.evaluation_metrics import metric_scale, metric_words
from jobs.events import (
    AttemptStarted,
    CheckpointSaved,
    EvaluationFinished,
    Event,
    JobSucceeded,
    MemoryMeasured,
    ModelLoaded,
    OomRecovered,
)

Mark = dict[str, str | int | float | Mapping[str, float]]
"""`step`, `kind` (attempt, oom) and `text`; of an evaluation `step`, `kind`, `loss`, and metrics by their words,
`shares` from 0 to 1 and `scores` to 100."""


@dataclass(frozen=True)
class SampleInTime:
    """A row that the model was asked at several evaluations."""

    input: str
    target: str
    before: str | None
    """What the model wrote at the first evaluation; None: it was not asked then."""
    generated: str
    """What it wrote at the one looked at."""
    probability: float | None


@dataclass(frozen=True)
class JobStory:
    """Of all events so far, in order."""

    evaluations: tuple[EvaluationFinished, ...]
    marks: tuple[Mark, ...]
    measured: MemoryMeasured | None
    loaded: ModelLoaded | None
    model_step: int | None
    """The step of the model that was kept; None: the job has not succeeded."""

    @property
    def peak_bytes(self) -> int | None:
        """Of the largest micro-batch that can come, as measured; None: no step was measured."""
        return None if self.measured is None else self.measured.peak_bytes

    def at(self, step: int | None) -> EvaluationFinished | None:
        """The last evaluation at this step; None: the newest."""
        found = [each for each in self.evaluations if step is None or each.step == step]
        return found[-1] if found else None

    def samples(self, evaluation: EvaluationFinished) -> list[SampleInTime]:
        """Its samples beside those of the first evaluation."""
        first = {each.input: each.generated for each in self.evaluations[0].samples}
        return [
            SampleInTime(each.input, each.target, first.get(each.input), each.generated, each.probability)
            for each in evaluation.samples
        ]


def story_of(events: Sequence[Event]) -> JobStory:
    """What is drawn of them. Of an evaluation that was done again, the newer counts."""
    evaluations: dict[int, EvaluationFinished] = {}
    marks: list[Mark] = []
    measured: MemoryMeasured | None = None
    loaded: ModelLoaded | None = None
    model_step: int | None = None
    step = 0
    for event in events:
        match event.fact:
            case EvaluationFinished() as fact:
                evaluations[fact.step] = fact
                step = fact.step
            case AttemptStarted() if event.attempt > 1:
                marks.append(_mark(step, "attempt", f"attempt {event.attempt}"))
            case ModelLoaded() as loaded:
                if loaded.resumed_step is not None:
                    step = loaded.resumed_step
                    if marks and marks[-1]["kind"] == "attempt":
                        marks[-1]["step"] = step
            case CheckpointSaved() as fact:
                step = fact.step
            case OomRecovered() as fact:
                before, after = fact.micro_batch_before, fact.micro_batch_after
                marks.append(_mark(fact.step, "oom", f"out of memory; micro-batch {before} → {after}"))
                step = fact.step
            case MemoryMeasured() as measured:
                pass
            case JobSucceeded(step=model_step):
                pass
    kept = sorted(evaluations.values(), key=lambda each: each.step)
    for each in kept:
        mark: Mark = {"step": each.step, "kind": "evaluation", "loss": each.loss}
        for scale in ("shares", "scores"):
            mark[scale] = {
                metric_words(name): each.metrics[name] for name in each.metrics if metric_scale(name) == scale
            }
        marks.append(mark)
    return JobStory(tuple(kept), tuple(marks), measured, loaded, model_step)


def _mark(step: int, kind: Literal["attempt", "oom"], text: str) -> Mark:
    return {"step": step, "kind": kind, "text": text}


def side_by_side(evaluations: Mapping[str, EvaluationFinished | None]) -> list[tuple[str, str, list[str | None]]]:
    """Input, reference, and what each job wrote (None: it was not asked), of rows that two jobs or more were asked."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for job, evaluation in evaluations.items():
        for each in evaluation.samples if evaluation else ():
            rows.setdefault((each.input, each.target), {})[job] = each.answer
    return [(*row, [said.get(job) for job in evaluations]) for row, said in rows.items() if len(said) > 1]
