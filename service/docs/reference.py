"""The pages of docs/reference/, written from the types, tables and routes that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from jobs.evaluation_metrics import EvaluationMetric
from jobs.events import AnyFact, Event
from jobs.metrics import MetricRow
from jobs.reasons import Reason
from jobs.redis.gauges import Snapshot
from jobs.spec import JobSpec
from jobs.sweeps.spec import SweepSpec
from jobs.text.schemas import REQUIRED, Schema, keys, line, part, values
from service.answers.conversion import UNWORDED
from service.edge.auth import RequestMetrics
from service.openapi.documented import MEANINGS, error_answer
from service.routes import health

_NOTE = "<!-- Written by `make openapi`: edit the source that the page names, not the page. -->\n"


def pages(app: FastAPI, environment: str) -> dict[str, str]:
    """Every page, by file name. `environment`: the text of `.env.example`."""
    written = {
        "job.md": _job(),
        "sweep.md": _sweep(),
        "events.md": _events(),
        "errors.md": _errors(),
        "metrics.md": _metrics(),
        "api.md": _routes(app.openapi()),
        "environment.md": _environment(environment),
    }
    return {name: _NOTE + "\n".join(lines).rstrip() + "\n" for name, lines in written.items()}


def _job() -> Iterator[str]:
    schema = JobSpec.model_json_schema()
    yield "# Job file"
    yield "\nEvery key of a job, from `jobs/spec.py`. Only `data.train` is required. Unknown keys are errors."
    own: dict[str, Schema] = {}
    parts: dict[str, Schema] = {}
    for key, field in schema["properties"].items():
        inner = part(field, schema["$defs"])
        (parts if inner else own)[key] = inner or field
    yield "\n## The job itself\n"
    yield from _keys("", own, schema)
    for key, inner in parts.items():
        yield f"\n## `{key}`\n\n{line(inner['description'])}\n"
        yield from _keys(f"{key}.", inner["properties"], schema)


def _sweep() -> Iterator[str]:
    schema = SweepSpec.model_json_schema()
    parameter = schema["$defs"]["Parameter"]
    yield "# Sweep file"
    yield "\nEvery key of a sweep, from `jobs/sweeps/spec.py`. `job` and `space` are required. Unknown keys are errors."
    yield "[Sweeps](../sweeps.md) says how one runs; `job` has the keys of a [job file](job.md).\n"
    yield from _keys("", schema["properties"], schema)
    yield f"\n## A parameter of `space`\n\n{line(parameter['description'])}\n"
    yield from _keys("", parameter["properties"], schema)


def _keys(prefix: str, fields: Mapping[str, Schema], schema: Schema) -> Iterator[str]:
    found = keys(fields, schema["$defs"], prefix)
    rows = ((f"`{key.name}`", key.values, _default(key.default), key.meaning) for key in found)
    yield from _table(("key", "values", "default", "meaning"), rows)


def _default(text: str) -> str:
    return text if text == REQUIRED else f"`{text}`"


def _events() -> Iterator[str]:
    yield "# Events"
    yield "\nA line of `events.jsonl` holds these fields, and as `fact` those of its `type` below (`jobs/events.py`)."
    yield "The API shows a fact's fields as `data`: schema `Event` of [openapi.json](../openapi.json).\n"
    envelope = Event.model_json_schema()["properties"]
    yield from _fields({name: field for name, field in envelope.items() if name != "fact"})
    shared: dict[str, Schema] = {}
    for fact in get_args(get_args(AnyFact)[0]):
        schema = fact.model_json_schema()
        shared |= schema.get("$defs", {})
        yield f"\n## `{schema['properties']['type']['const']}`\n\n{line(schema['description'])}"
        if fields := {name: field for name, field in schema["properties"].items() if name != "type"}:
            yield ""
            yield from _fields(fields)
    yield "\n## Parts of events"
    for name, schema in sorted(shared.items()):
        yield f"\n### {name}\n\n{line(schema.get('description', ''))}"
        if fields := schema.get("properties", {}):
            yield ""
            yield from _fields(fields)
        elif values := schema.get("enum"):
            yield f"\n{', '.join(f'`{value}`' for value in values)}"


def _errors() -> Iterator[str]:
    yield "# Reasons and error codes"
    yield "\n[Troubleshooting](../troubleshooting.md) says more of what to do. What is wrong with a job, an"
    yield "export or an upload has a `code` as well, with a message and mostly a hint: those codes are not listed."
    yield "\n## How an attempt ends\n\n`reason` of `attempt.ended`.\n"
    yield from _table(
        ("reason", "meaning", "next attempt", "exit code", "hint"),
        ((f"`{each}`", each.sentence, each.next_attempt, f"{each.exit_code}", each.hint or "") for each in Reason),
    )
    yield '\n## Errors of the API\n\nOne shape: `{"error": {"type", "code", "message", "param"}}`, with a `hint` where'
    yield "there is one. `param` is the dotted key of the job file, or the parameter of the request."
    for status, meaning in MEANINGS.items():
        yield f"\n### {status}\n\n{meaning}\n"
        examples = error_answer(status)["content"]["application/json"]["examples"]
        errors = {code: example["value"]["error"] for code, example in examples.items()}
        yield from _table(
            ("code", "an example", "its hint"),
            ((f"`{code}`", error["message"], error.get("hint", "")) for code, error in errors.items()),
        )


def _metrics() -> Iterator[str]:
    yield "# Metrics"
    yield f"\n## Rows of `metrics.jsonl`\n\n{line(MetricRow.__doc__ or '')}\n"
    yield from _fields(MetricRow.model_json_schema()["properties"])
    yield "\n## Figures of an evaluation\n\nFrom `jobs/evaluation_metrics.py`; `evaluation.metrics` chooses among those"
    yield "of the task. Where no other rule decides, the one with the lowest rank says whether the model is better than"
    yield "before training ([the verdict](../operations.md#is-the-model-any-good)).\n"
    yield from _table(
        ("metric", "tasks", "computed from", "better", "rank", "meaning"),
        (
            (
                f"`{each}`",
                ", ".join(f"`{task}`" for task in each.tasks),
                " or ".join(each.bases),
                "higher" if each.higher_is_better else "lower",
                "" if each.judges is None else f"{each.judges}",
                each.meaning,
            )
            for each in EvaluationMetric
        ),
    )
    yield "\n## Prometheus\n\n`GET /metrics`, from `service/routes/health.py`.\n"
    registry = CollectorRegistry()
    RequestMetrics(registry).observe({"method": "GET"}, 200, 0.0)
    families = [*health.families([], Snapshot({}, {}, []), 0), *UNWORDED.collect(), *registry.collect()]
    rows = []
    for family in families:
        labels = getattr(family, "_labelnames", ()) or (family.samples[0].labels if family.samples else ())
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(
            (f"`{name}`", family.type, ", ".join(f"`{each}`" for each in labels if each != "le"), family.documentation)
        )
    yield from _table(("name", "type", "labels", "meaning"), rows)


def _routes(document: Schema) -> Iterator[str]:
    yield "# Routes"
    yield "\nFrom the routes themselves. Parameters, bodies and answers in full: [openapi.json](../openapi.json),"
    yield "which the service also answers at `/openapi.json`. Error codes: [errors.md](errors.md)."
    operations = [
        (operation["tags"][0], method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    for tag in document["tags"]:
        yield f"\n## {tag['name'].capitalize()}\n\n{tag['description']}\n"
        yield from _table(
            ("route", "what it does", "statuses"),
            (
                (f"`{method} {path}`", _first(operation["description"]), " ".join(operation["responses"]))
                for name, method, path, operation in operations
                if name == tag["name"]
            ),
        )


def _environment(text: str) -> Iterator[str]:
    """From `.env.example`: after an introduction, blocks of a title and of variables, each below its meaning."""
    yield "# Environment variables"
    yield "\nThe service and the workers read these once, when they start. `.env.example` holds their defaults."
    for block in text.split("\n\n")[1:]:
        title, *written = block.strip().splitlines()
        yield f"\n## {title.removeprefix('# ')}\n"
        rows, meaning = [], ""
        for each in written:
            if each.startswith("#"):
                meaning += each.removeprefix("#")
            else:
                name, _, default = each.partition("=")
                rows.append((f"`{name}`", f"`{default}`" if default else "", meaning.strip()))
                meaning = ""
        yield from _table(("variable", "default", "meaning"), rows)


def _fields(properties: Mapping[str, Schema]) -> Iterator[str]:
    rows = (
        (f"`{name}`", values(field, links=True), line(field.get("description", "")))
        for name, field in properties.items()
    )
    yield from _table(("field", "type", "meaning"), rows)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _first(text: str) -> str:
    """Its first sentence."""
    first, point, _ = line(text).partition(". ")
    return first + point.rstrip()
