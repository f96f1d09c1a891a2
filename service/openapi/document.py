"""The OpenAPI document: what FastAPI finds in the routes, and what it cannot know of them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema

from jobs.export import ExportRequest, PushRequest
from jobs.generation import GenerateBody
from jobs.spec import JobSpec
from jobs.sweeps.spec import SweepSpec
from service.edge.limits import OPEN
from service.errors import ErrorResponse
from service.generation.openai import ChatBody
from service.jobs.sweeps import Repetition
from service.openapi import examples
from service.openapi.documented import error_answer

STORY = """\
Fine-tuning on one box, for a small team:

1. `PUT /datasets/recipes.jsonl` with the file as the body; or put the file into the data directory.
2. `POST /jobs` with `{"data": {"train": "dataset:recipes.jsonl"}}`: the job is checked, prepared, and waits
   for its turn.
3. `GET /jobs/{job}/events` with `Accept: text/event-stream`: what happens, live, in sentences.
4. `POST /jobs/{job}/pause` gives the GPU back, `/resume` resumes from the checkpoint; restarts and full GPUs it
   survives by itself.
5. `GET /jobs/{job}/files/model`: the model, as a tar of a folder that `from_pretrained` opens.

Names and shapes are those of OpenAI's fine-tuning API where it has them. Every error has one shape.
Lists are pages: `after` takes the `last_id` of the page before. Times are Unix seconds. Null: not known, or not yet.
"""
TAGS = {
    "jobs": "Submit, list, show and control jobs.",
    "sweeps": "Many trials of one job.",
    "events": "What happened to a job: as a list, or live.",
    "series": "What a run recorded: metrics and log.",
    "plans": "What a job needs, as predicted before it trains.",
    "comparisons": "What differs between jobs, and what it costs.",
    "models": "Try what a job has learned.",
    "exports": "The model for other programs, and on the hub.",
    "results": "Checkpoints, files, the model.",
    "datasets": "Uploaded files of rows.",
    "workers": "Worker processes.",
    "operators": "For operators of the service.",
    "health": "For container engines and monitoring.",
}
_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of the service (LONGHAUL_API_KEY, or one made with `longhaul key NAME`). A service "
    "that listens on loopback only may have none.",
}
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "Names this request in the service's log.",
        "required": True,
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds to wait before the next try.",
        "required": True,
        "schema": {"type": "integer", "minimum": 0},
    },
}


def operation_id(route: APIRoute) -> str:
    """The name of the function."""
    return route.name


def install(app: FastAPI) -> None:
    """Make `app.openapi()` and `/openapi.json` the whole document."""

    def whole() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document(app, examples=examples.by_schema())
        return app.openapi_schema

    app.openapi = whole  # type: ignore[method-assign]  # the way FastAPI's manual says


def document(app: FastAPI, *, examples: dict[str, Any]) -> dict[str, Any]:
    """The document of this application's routes. `examples`: by the name of their schema."""
    tags = [{"name": name, "description": description} for name, description in TAGS.items()]
    made = get_openapi(
        title=app.title, version=app.version, description=STORY, tags=tags, routes=app.routes, servers=app.servers
    )
    components = made.setdefault("components", {})
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    _, more = models_json_schema(
        [
            (JobSpec, "validation"),
            (SweepSpec, "validation"),
            (Repetition, "validation"),
            (GenerateBody, "validation"),
            (ChatBody, "validation"),
            (ExportRequest, "validation"),
            (PushRequest, "validation"),
            (ErrorResponse, "serialization"),
        ],
        ref_template="#/components/schemas/{model}",
    )
    schemas.update(more["$defs"])
    for name, example in examples.items():
        schemas[name]["examples"] = [example]
    components["headers"] = _HEADERS
    components["securitySchemes"] = {"bearer": _BEARER}
    made["security"] = [{"bearer": []}]
    components["responses"] = {}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            _complete(path, operation, components)
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shape of errors, which is not ours
        schemas.pop(name, None)
    components["schemas"] = dict(sorted(schemas.items()))
    components["responses"] = dict(sorted(components["responses"].items()))
    return made | {"paths": _untitled(made["paths"]), "components": _untitled(components)}


def _untitled(part: Any) -> Any:
    """Without titles, which only say the names of fields again."""
    if isinstance(part, dict):
        kept = {key: value for key, value in part.items() if not (key == "title" and isinstance(value, str))}
        return {key: value if key.startswith("example") else _untitled(value) for key, value in kept.items()}
    return [_untitled(each) for each in part] if isinstance(part, list) else part


def _complete(path: str, operation: dict[str, Any], components: dict[str, Any]) -> None:
    """What holds for every route."""
    for parameter in operation.get("parameters", []):
        _never_null(parameter)
    if path in OPEN:
        operation["security"] = []
    responses = operation["responses"]
    if responses.get("422", {}).get("description") == "Validation Error":  # FastAPI guesses it; a route says it itself
        del responses["422"]
    for status, response in responses.items():
        if int(status) >= 400:
            components["responses"][f"Error{status}"] = _answered(error_answer(int(status)))
            responses[status] = {"$ref": f"#/components/responses/Error{status}"}
            continue
        if response["description"] == "Successful Response":
            response["description"] = _first_sentence(response, components["schemas"]) or _of(operation["description"])
        _answered(response)
    operation["responses"] = dict(sorted(responses.items()))


def _never_null(parameter: dict[str, Any]) -> None:
    """A header or a part of a query is there or not; there is no way to send null."""
    schema = parameter["schema"]
    kinds = [kind for kind in schema.get("anyOf", []) if kind != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])
    schema.pop("description", None)  # the parameter says it


def _answered(response: dict[str, Any]) -> dict[str, Any]:
    """With the header that every answer has."""
    response.setdefault("headers", {})["X-Request-Id"] = {"$ref": "#/components/headers/X-Request-Id"}
    return response


def _first_sentence(response: dict[str, Any], schemas: dict[str, Any]) -> str:
    """What the model of an answer says of itself; '' for one without."""
    content = next(iter(response["content"].values()))["schema"]
    return _of(schemas.get(content.get("$ref", "").rpartition("/")[2], {}).get("description", ""))


def _of(description: str) -> str:
    """The first sentence."""
    first, point, _ = " ".join(description.split()).partition(". ")
    return first + point.rstrip()
