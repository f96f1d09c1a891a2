"""schemathesis against the running service: every phase, every check, with the ids of jobs that are in every state.

What is tuned, and why:

- Ids, names of files and data sets are mostly drawn from what there is (a schema cannot list it); the rest are made up.
- A stream that follows an open job would never end, so `follow` and `Accept: text/event-stream` are sent for jobs that
  have ended alone, and often. That an open job's stream ends with the job is shown in test_events and test_logs.
- An Idempotency-Key is used up by the first body that comes with it: most submissions go without.
- Whoever cancels or deletes one of those jobs gets a new one for it, so that there is a job in every state to the end.
- A made-up `Transfer-Encoding` or `Content-Length` is taken out: that is no HTTP, and uvicorn says so (400) before a
  route is looked for.
- `negative_data_rejection` takes a number for wrong where labels are strings; in a query both are the same characters.
- `ensure_resource_availability` would have a new job's plan at once; it is there when check has made it (404 before).
- `positive_data_acceptance` takes 4xx where the schema cannot say what makes a request good; `_TUNED` says why.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from schemathesis.engine import events, from_schema
from schemathesis.generation.meta import TestPhase

from tests.service.running import Service
from tests.service.seeded import seed_sweep

SEED = 20_251_121
ENDED = ("succeeded", "failed", "cancelled", "validated")
EVENT_STREAM = "GET /jobs/{job}/events"
LIST = "GET /jobs"
LOG = "GET /jobs/{job}/logs"
CANCEL = "POST /jobs/{job}/cancel"
DELETE = "DELETE /jobs/{job}"
CANCEL_SWEEP = "POST /sweeps/{sweep}/cancel"
DELETE_SWEEP = "DELETE /sweeps/{sweep}"
ACCEPTED = ["2xx", 401, 403, 404, 409]
OPEN = ("queued", "waiting", "paused", "running", "stopping")
PLANNED = ("queued", "paused", "running", "succeeded")
TRAINED = ("running", "succeeded")


@dataclass(frozen=True)
class Tuned:
    """What differs for one operation."""

    jobs: tuple[str, ...] = ()
    """Jobs that have something to show there; none: any job."""
    refused: int | None = None
    """`positive_data_acceptance` takes this status, too."""
    why: str = ""


_TUNED = {
    LIST: Tuned(),
    "POST /jobs": Tuned(refused=422, why="what columns, names and endings fit each other is said in words alone"),
    "POST /sweeps": Tuned(refused=422, why="which values make a job is said in words alone"),
    "POST /sweeps/{sweep}/repeat": Tuned(refused=422, why="which trials there are depends on the sweep"),
    "PATCH /jobs/{job}": Tuned(OPEN, 422, "11.0 is an integer to JSON Schema, and none to us"),
    "POST /jobs/{job}/clone": Tuned(refused=422, why="what results from a merge patch has to be a specification"),
    "POST /jobs/{job}/generate": Tuned(refused=422, why="which inputs and options go together is said in words alone"),
    "POST /jobs/{job}/exports": Tuned(("succeeded",)),
    "POST /jobs/{job}/push": Tuned(("succeeded",)),
    "GET /jobs/{job}/push": Tuned(("succeeded",)),
    "PUT /datasets/{name}": Tuned(refused=422, why="whether a checksum is right depends on the body"),
    "POST /jobs/{job}/pause": Tuned(OPEN),
    "POST /jobs/{job}/resume": Tuned(("paused", "stopping")),
    "GET /jobs/{job}/plan": Tuned(PLANNED),
    "GET /jobs/{job}/plan.png": Tuned(PLANNED),
    "GET /jobs/{job}/preview": Tuned(PLANNED),
    "GET /jobs/{job}/checkpoints": Tuned(TRAINED),
    "GET /jobs/{job}/files": Tuned(TRAINED),
    "GET /jobs/{job}/files/{path}": Tuned(TRAINED, 416, "which ranges a file has depends on its size"),
}
_MADE_LATER = ("GET /jobs/{job}/plan", "GET /jobs/{job}/plan.png", "GET /jobs/{job}/preview")


LARGE = ("POST /jobs", "POST /sweeps", "POST /jobs/{job}/generate", "POST /v1/chat/completions")
"""Whose bodies have so many keys that the coverage phase has two thirds of its cases for them."""
COMPARE, COMPARED = "GET /compare", r"job-[a-z0-9_-]{1,60}"
"""What compares jobs, and their ids: of two that exist."""


@dataclass
class Outcome:
    """What came of it."""

    requests: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """By operation, check and title: one way to see it again."""
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by operation and status."""
    checks: Counter[str] = field(default_factory=Counter)
    """Checks that were made, by name."""
    errors: list[str] = field(default_factory=list)
    """What kept schemathesis itself from working."""

    def counted(self, *checks: str) -> int:
        """Failures of these checks."""
        return sum(name.split(": ")[1] in checks for name in self.failures)


def fuzz(
    service: Service, jobs: dict[str, str], *, examples: int, phases: tuple[str, ...], of_large: float = 1.0
) -> Outcome:
    """Run these phases over all operations, with at most so many examples of each in fuzzing; `of_large`: the share of
    coverage's cases of `LARGE` that is sent, drawn with `SEED`.
    """
    sweeps = [seed_sweep(service, ended=True), seed_sweep(service, ended=False)]
    config = schemathesis.Config.from_dict(_config(service, jobs, sweeps, examples=examples, phases=phases))
    key = {"Authorization": f"Bearer {service.settings.api_key}"}
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", headers=key, config=config)
    ended = [jobs[name] for name in ENDED]
    seeded = set(jobs.values())
    chance = random.Random(SEED)

    def mind_the_jobs(_context: Any, case: Any, _kwargs: Any) -> None:
        label, path, headers = case.operation.label, case.path_parameters or {}, case.headers
        if label == EVENT_STREAM and chance.random() < 0.5:
            headers["Accept"] = "text/event-stream"
            path["job"] = chance.choice(ended)
        if label == LOG and "follow" in (case.query or {}):
            path["job"] = chance.choice(ended)
        if label == COMPARE and (ids := case.query["jobs"] if case.query.keys() == {"jobs"} else None):
            given = ids if isinstance(ids, list) else str(ids).split(",")
            if 2 <= len(set(given)) == len(given) <= 10 and all(re.fullmatch(COMPARED, str(each)) for each in given):
                case.query["jobs"] = ",".join(chance.sample(sorted(seeded), 2))
        if headers:
            headers.pop("Transfer-Encoding", None)
            headers.pop("Content-Length", None)
            if chance.random() < 0.75:
                headers.pop("Idempotency-Key", None)
        if label in (CANCEL, DELETE) and path.get("job") in seeded:
            path["job"] = service.submit()
            if label == DELETE:
                service.post(f"/jobs/{path['job']}/cancel")
        if label in (CANCEL_SWEEP, DELETE_SWEEP) and path.get("sweep") in sweeps:
            path["sweep"] = seed_sweep(service, ended=label == DELETE_SWEEP)

    drawn = random.Random(SEED)

    def draw(_context: Any, case: Any) -> bool:
        covers = case.meta is not None and case.meta.phase.name is TestPhase.COVERAGE
        return not covers or case.operation.label not in LARGE or drawn.random() < of_large

    outcome = Outcome()
    schemathesis.hook("before_call")(mind_the_jobs)
    schemathesis.hook("filter_case")(draw)
    try:
        for event in from_schema(schema).execute():
            if isinstance(event, events.ScenarioFinished):
                _count(outcome, event.recorder)
            elif isinstance(event, events.NonFatalError):
                outcome.errors.append(f"{event.label}: {event.info.format()}")
            elif isinstance(event, events.FatalError):
                raise event.exception
    finally:
        schemathesis.hooks.unregister(mind_the_jobs)
        schemathesis.hooks.unregister(draw)
    return outcome


def _count(outcome: Outcome, recorder: Any) -> None:
    for case_id, interaction in recorder.interactions.items():
        outcome.requests += 1
        label = recorder.cases[case_id].value.operation.label
        if interaction.response is None:
            outcome.failures[f"{label}: no answer: {interaction.request.method} {interaction.request.uri}"] = ""
        else:
            outcome.statuses[label, interaction.response.status_code] += 1
        for check in recorder.checks.get(case_id, []):
            outcome.checks[check.name] += 1
            if check.failure_info is not None:
                failure = check.failure_info.failure
                name = f"{label}: {check.name}: {failure.title}"
                outcome.failures.setdefault(name, f"{failure.message}\n{check.failure_info.code_sample}")


def _config(
    service: Service, jobs: dict[str, str], sweeps: list[str], *, examples: int, phases: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "seed": SEED,
        "continue-on-failure": True,
        "request-timeout": 20.0,
        "suppress-health-check": ["all"],
        "cache": {"enabled": False},
        "generation": {
            "max-examples": examples,
            "deterministic": True,
            "unique-inputs": True,
            "database": "none",
            "no-shrink": True,
        },
        "phases": {"enabled": False, **{phase: {"enabled": True} for phase in phases}},
        "auth": {"openapi": {"bearer": {"bearer": service.settings.api_key}}},
        "dictionaries": {
            "jobs": {"values": list(jobs.values())},
            "sweeps": {"values": sweeps},
            **{
                "+".join(each.jobs): {"values": [jobs[name] for name in each.jobs]}
                for each in _TUNED.values()
                if each.jobs
            },
            "files": {
                "values": [
                    "model",
                    "model/config.json",
                    "model/empty",
                    "plan.json",
                    "checkpoints",
                    "metrics.jsonl",
                    "events.jsonl",
                ]
            },
            "datasets": {"values": ["rows.jsonl", "more.csv", "unused.jsonl"]},
            "models": {"values": ["builtin:t5-tiny", "google/flan-t5-xl", "./my-model"]},
            "rows": {"values": ["rows.jsonl", "dataset:rows.jsonl", "org/name", "deep/er/rows.csv.gz"]},
            "ranges": {"values": ["bytes=0-9", "bytes=5-", "bytes=-3", "bytes=0-0,5-6", "bytes=999999999-"]},
        },
        "parameters": {
            "path.job": {"dictionary": "jobs", "probability": 0.8},
            "path.sweep": {"dictionary": "sweeps", "probability": 0.8},
            "path.path": {"dictionary": "files", "probability": 0.7},
            "path.name": {"dictionary": "datasets", "probability": 0.7},
            "body.model": {"dictionary": "models", "probability": 0.9},
            "body.data.train": {"dictionary": "rows", "probability": 0.9},
            "header.range": {"dictionary": "ranges", "probability": 0.6},
        },
        "checks": {"positive_data_acceptance": {"expected-statuses": ACCEPTED}},
        "operations": [_tuned(name, tuned) for name, tuned in _TUNED.items()],
    }


def _tuned(name: str, tuned: Tuned) -> dict[str, Any]:
    accepted = [*ACCEPTED, tuned.refused] if tuned.refused else ACCEPTED
    checks: dict[str, Any] = {"positive_data_acceptance": {"expected-statuses": accepted}}
    if name == LIST:
        checks["negative_data_rejection"] = {"enabled": False}
    if name in _MADE_LATER:
        checks["ensure_resource_availability"] = {"enabled": False}
    settings: dict[str, Any] = {"include-name": name, "checks": checks}
    if tuned.jobs:
        settings["parameters"] = {"path.job": {"dictionary": "+".join(tuned.jobs), "probability": 0.8}}
    return settings
