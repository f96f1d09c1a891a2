"""Why the memory of a job did not suffice where that of another did, in lines and in a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from jobs.comparison.answer import Cause, CauseLine, SharedCause
from jobs.comparison.attribution import limit_costs
from jobs.comparison.division import Costs
from jobs.comparison.facts import JobFacts
from jobs.text.units import bytes_alike, format_bytes

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
