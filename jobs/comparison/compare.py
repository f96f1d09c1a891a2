"""Jobs side by side: only what differs, what it costs, and why the memory of one did not suffice."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

from pydantic import JsonValue

from jobs.comparison.answer import (
    Cause,
    CauseLine,
    ComparedJob,
    Comparison,
    Difference,
    DifferenceGroup,
    GroupName,
    PlannedMemory,
    SeedRuns,
    SharedCause,
    SharedCost,
)
from jobs.comparison.attribution import Costs, limit_costs, memory_costs, time_costs
from jobs.comparison.facts import JobFacts, differing_facts, differing_settings, group_of, group_of_fact, is_label
from jobs.evaluation_metrics import EvaluationMetric
from jobs.text.units import bytes_alike, format_bytes

# -- causes ------------------------------------------------------------------------------------------------------------
# Why the memory of a job did not suffice where that of another did, in lines and in a sentence.

Between = Mapping[str, tuple[JsonValue, JsonValue]]
"""Values in the reference and in the other job, by key, where they differ."""
LONGEST = 60
"""Characters of a value in a sentence."""


def find_cause(
    before: JobFacts, after: JobFacts, between: Between, need: Costs | None, names: tuple[str, str]
) -> Cause:
    """Of `after`, whose memory did not suffice. `need`: what it needs more, where both were planned."""
    costs = limit_costs(before, after, between.keys())
    if need is not None:
        costs.take(need)
    rounded = {keys: {name: round(cost) for name, cost in parts.items()} for keys, parts in costs.parts.items()}
    lines = [
        CauseLine(
            key=keys[0],
            text=_say(keys[0], between, before, after),
            bytes=sum(parts.values()),
            parts=parts,
            estimated=keys in costs.estimated,
        )
        for keys, parts in rounded.items()
        if len(keys) == 1
    ]
    together = [
        SharedCause(keys=list(keys), bytes=sum(parts.values()), parts=parts)
        for keys, parts in rounded.items()
        if len(keys) > 1
    ]
    cause = Cause(
        job=after.record.id,
        text="",
        bytes=sum(sum(parts.values()) for parts in rounded.values()),
        lines=sorted(lines, key=lambda line: -line.bytes),
        together=sorted(together, key=lambda each: -each.bytes),
        unexplained_bytes=sum(rounded.get((), {}).values()),
    )
    sentences = [*_need(cause, names, planned=need is not None), *_limit(cause), *_seen(after, between)]
    return cause.model_copy(update={"text": " ".join(sentences)})


def _need(cause: Cause, names: tuple[str, str], *, planned: bool) -> list[str]:
    """How much more it needs, and for what."""
    if not planned:
        return [f"{names[1]} ended before its memory was planned."]
    more = cause.bytes - sum(each.parts.get("limit", 0) for each in cause.lines + cause.together)
    told = [(line.text, line.bytes) for line in cause.lines if line.parts.keys() - {"limit"}]
    told += [(f"{_listed(each.keys)} together", each.bytes) for each in cause.together]
    if cause.unexplained_bytes:
        told.append(("what no setting explains", cause.unexplained_bytes))
    if not told:
        return [f"By its plan, {names[1]} needs no more than {names[0]}."]
    because = ", ".join(f"{text} ({'+' if cost >= 0 else '−'}{format_bytes(abs(cost))})" for text, cost in told)
    return [f"{names[1]} needs {format_bytes(abs(more))} {'more' if more >= 0 else 'less'} than {names[0]}: {because}."]


def _limit(cause: Cause) -> list[str]:
    """How much less it may use, and why."""
    found = [(each.text, each.parts["limit"]) for each in cause.lines if "limit" in each.parts]
    return [f"It may use {format_bytes(abs(cost))} {'less' if cost >= 0 else 'more'}: {text}." for text, cost in found]


def _seen(job: JobFacts, between: Between) -> list[str]:
    """What no plan knows."""
    said = []
    if isinstance(held := between.get("memory.other_processes_bytes", (None, None))[1], int) and held:
        said.append(f"Other processes held {format_bytes(held)} of its GPU.")
    measured = job.measured
    if measured is not None and measured.measured_bytes > measured.predicted_bytes:
        took, predicted = bytes_alike(measured.measured_bytes, measured.predicted_bytes)
        said.append(f"Its first step took {took}, where {predicted} were predicted.")
    return said


def _listed(keys: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))


def _say(key: str, between: Between, before: JobFacts, after: JobFacts) -> str:
    """Such as `data.max_tokens is 2,048, not 512`; types as they are in memory, whatever was asked for."""
    match key:
        case "method.adapter_dtype":
            return f"the adapters are {after.adapter_dtype}, not {before.adapter_dtype}"
        case "method.base_dtype" | "model.dtype":
            return f"the model is {after.base_dtype}, not {before.base_dtype}"
    was, now = (_shown(key, value) for value in between[key])
    return f"{key} is {now}, not {was}"


def _shown(key: str, value: JsonValue) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# -- compare -----------------------------------------------------------------------------------------------------------

_PREDICTED = ("memory.peak_bytes", "memory.parts.")
"""Keys of predicted memory: the whole, and its categories."""
Found = list[tuple[GroupName, Difference]]


def compare(jobs: Sequence[JobFacts]) -> Comparison:
    """What differs between two jobs or more."""
    settings, equal = differing_settings([job.spec for job in jobs])
    differences = [Difference(key=key, origin="job", values=values) for key, values in settings.items()]
    found: Found = [(group_of(each.key), each) for each in differences if not is_label(each.key)]
    found += _facts(jobs, {each.key for _, each in found})
    reference = _reference(jobs)
    between = [_between(found, reference, place) for place in range(len(jobs))]
    memory = [memory_costs(jobs[reference], job, keys) for job, keys in zip(jobs, between, strict=True)]
    time = [time_costs(jobs[reference], job, keys) for job, keys in zip(jobs, between, strict=True)]
    names = _names(jobs)
    return Comparison(
        reference=jobs[reference].record.id,
        jobs=[_compared(job) for job in jobs],
        causes=[
            find_cause(jobs[reference], job, keys, costs, (names[reference], name))
            for job, keys, costs, name in zip(jobs, between, memory, names, strict=True)
            if job.lacked_memory and not jobs[reference].lacked_memory
        ],
        groups=list(_groups(found, reference, memory, time)),
        shared=list(_shared(memory)),
        labels=[each for each in differences if is_label(each.key)],
        equal=equal,
        seeds=list(_seeds(jobs)),
    )


def _reference(jobs: Sequence[JobFacts]) -> int:
    """The place of the first that did not lack memory, and has a plan of it."""
    return min(range(len(jobs)), key=lambda place: (jobs[place].lacked_memory, jobs[place].memory is None))


def _names(jobs: Sequence[JobFacts]) -> list[str]:
    """What sentences call them: by name where that tells them apart."""
    count = Counter(job.spec.name for job in jobs)
    return [job.spec.name if count[job.spec.name] == 1 else job.record.id for job in jobs]


def _facts(jobs: Sequence[JobFacts], settings: set[str]) -> Iterator[tuple[GroupName, Difference]]:
    """What differs beside the settings, and does not only repeat one."""
    of_plan = differing_facts(jobs, JobFacts.of_plan)
    for key, values in of_plan.items():
        part, _, name = key.partition(".")
        if part == "resolved" and all(_asked(job, name) != "auto" for job in jobs):
            continue
        if part == "plan" and f"data.{name}" in settings:
            continue
        if key == "data.prepared" and any(_shapes_rows(each) for each in settings):
            continue
        yield group_of_fact(key), Difference(key=key, origin="plan", values=values)
    for key, values in differing_facts(jobs, JobFacts.of_run).items():
        name = EvaluationMetric.LOSS.value if key == "final_loss" else key.removeprefix("final_metrics.")
        intervals = [job.record.result_intervals.get(name) for job in jobs]
        known = intervals if any(intervals) else None
        yield group_of_fact(key), Difference(key=key, origin="run", values=values, intervals=known)


def _asked(job: JobFacts, name: str) -> object:
    """What the job asks for of what the plan decides."""
    if name == "gpus":
        return job.spec.resources.gpus
    return job.spec.speed.compile if name == "compile" else getattr(job.spec.memory, name)


def _shapes_rows(key: str) -> bool:
    """Whether other prepared rows follow from a setting by themselves."""
    return key == "model" or key.startswith(("data.", "task."))


def _between(found: Found, reference: int, place: int) -> Between:
    """What differs between the reference and another job; of what was found of a run, as far as it is known of both."""
    pairs = {each.key: (each.values[reference], each.values[place]) for _, each in found}
    of_job = {each.key for _, each in found if each.origin == "job"}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1] and (key in of_job or None not in pair)}


def _groups(
    found: Found, reference: int, memory: Sequence[Costs | None], time: Sequence[Costs | None]
) -> Iterator[DifferenceGroup]:
    """What costs most first; the outcome in its own order."""
    for name in get_args(GroupName):
        differences = [
            each.model_copy(
                update={
                    "bytes": _more(each, reference) or _costs(each.key, memory, round),
                    "seconds": _costs(each.key, time, lambda cost: round(cost, 1)),
                }
            )
            for group, each in found
            if group == name
        ]
        if name != "outcome":
            differences.sort(key=_most, reverse=True)
        if differences:
            yield DifferenceGroup(name=name, differences=differences)


def _more(difference: Difference, reference: int) -> list[int | None] | None:
    """Of predicted bytes, how many more than those of the reference; None: it is something else."""
    first = difference.values[reference]
    if not difference.key.startswith(_PREDICTED) or not isinstance(first, int):
        return None
    return [each - first if isinstance(each, int) else None for each in difference.values]


def _costs(key: str, costs: Sequence[Costs | None], shown: Callable[[float], float]) -> list[float | None] | None:
    """Of each job; None: it is not known to cost anything."""
    if all(each is None or each.of(key) is None for each in costs):
        return None
    return [None if each is None else shown(each.of(key) or 0) for each in costs]


def _most(difference: Difference) -> tuple[float, float]:
    def highest(costs: Sequence[float | None] | None) -> float:
        return max((abs(cost or 0) for cost in costs or ()), default=0)

    return highest(difference.bytes), highest(difference.seconds)


def _shared(memory: Sequence[Costs | None]) -> Iterator[SharedCost]:
    together = dict.fromkeys(keys for costs in memory if costs for keys in costs.parts if len(keys) > 1)
    for keys in together:
        yield SharedCost(
            keys=list(keys), bytes=[None if costs is None else round(costs.of(*keys) or 0) for costs in memory]
        )


def _compared(job: JobFacts) -> ComparedJob:
    record, memory = job.record, job.memory
    planned = None
    if memory is not None:
        figures = {name: getattr(memory, name) for name in PlannedMemory.model_fields if name != "measured_bytes"}
        planned = PlannedMemory(**figures, measured_bytes=job.measured and job.measured.measured_bytes)
    return ComparedJob(id=record.id, name=job.spec.name, status=record.status, error=record.error, memory=planned)


def _seeds(jobs: Sequence[JobFacts]) -> Iterator[SeedRuns]:
    """Jobs whose settings are the same but for the seed."""
    alike: defaultdict[str, list[JobFacts]] = defaultdict(list)
    for job in jobs:
        alike[_without_seed(job)].append(job)
    for group in alike.values():
        seeds = [job.spec.training.seed for job in group]
        if len(set(seeds)) < 2:
            continue
        losses = [job.record.result_loss for job in group if job.record.result_loss is not None]
        yield SeedRuns(
            jobs=[job.record.id for job in group],
            seeds=seeds,
            n=len(losses),
            mean=statistics.fmean(losses) if losses else None,
            standard_deviation=statistics.stdev(losses) if len(losses) > 1 else None,
        )


def _without_seed(job: JobFacts) -> str:
    """The same for all jobs that differ in nothing else that matters."""
    labels = {"name", "metadata", "priority", "integrations"}
    return job.spec.model_dump_json(exclude={**dict.fromkeys(labels, True), "training": {"seed"}})
