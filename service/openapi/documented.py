"""How routes add to the OpenAPI document what their answer models do not say: parameters, bodies, errors.

    @router.get("/{job}", responses=documented(404))
    def get_job(job: JobId) -> answers.Job:

The schemas referred to here are put into the document by `service/openapi/document.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Path

from jobs.comparison.answer import FEWEST, MOST
from jobs.metrics import MetricRow
from service.openapi.error_answers import MEANINGS

Responses = dict[int | str, dict[str, Any]]
_EVERYWHERE = (401, 403, 429, 500, 503)


def documented(*statuses: int, everywhere: tuple[int, ...] = _EVERYWHERE) -> Responses:
    """`responses` of a route: errors that every route has, and these; `document.py` says the rest of them."""
    return {status: {"description": MEANINGS[status]} for status in sorted({*everywhere, *statuses})}


def ref(name: str) -> dict[str, str]:
    """A schema of the document, by name."""
    return {"$ref": f"#/components/schemas/{name}"}


# -- parameters -------------------------------------------------------------------------------------------------------

JobId = Annotated[str, Path(description="Id of the job.", examples=["job-06e1m8c4f0zt3qk5x9wb"])]
SweepId = Annotated[str, Path(description="Id of the sweep.", examples=["sweep-06e1m8c4f0zt3qk5x9wb"])]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="Any text of your own, 1 to 255 visible ASCII characters. Sending the same body again under the "
        "same key returns what the first one made, however often the connection broke.",
        json_schema_extra={"examples": ["chef-2025-11-21"]},
    ),
]
METADATA_FILTER: dict[str, Any] = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "explode": True,
    "description": "Only jobs with these labels: `metadata[team]=kitchen`. All keys must match, each with one "
    "of the values given for it; at most 16 in all.",
    "schema": {
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 512},
        "propertyNames": {"minLength": 1, "maxLength": 64},
        "maxProperties": 16,
    },
}
METRIC_FIELDS: dict[str, Any] = {
    "name": "fields",
    "in": "query",
    "style": "form",
    "explode": False,
    "description": "Only these, separated by commas: `loss,rows_per_s`. `step`, `at` and `attempt` always come.",
    "schema": {
        "type": "array",
        "items": {"type": "string", "enum": list(MetricRow.model_fields)},
        "minItems": 1,
        "maxItems": 100,
        "examples": [["loss", "rows_per_s"]],
    },
}
COMPARED_JOBS: dict[str, Any] = {
    "name": "jobs",
    "in": "query",
    "required": True,
    "style": "form",
    "explode": False,
    "description": "Their ids, separated by commas.",
    "schema": {
        "type": "array",
        "items": {"type": "string", "pattern": "^job-[a-z0-9_-]{1,60}$"},
        "minItems": FEWEST,
        "maxItems": MOST,
        "uniqueItems": True,
        "examples": [["job-06e1m8c4f0zt3qk5x9wb", "job-06e1m8c4f0zt3qk5x9wc"]],
    },
}

# -- bodies: read by `service/edge/body.py`, or streamed, and so unknown to FastAPI ------------------------------------


def takes(media_type: str, schema: dict[str, Any], description: str, examples: dict[str, Any]) -> dict[str, Any]:
    """`openapi_extra` of a route with a body. `examples`: by name, each a body."""
    shown = {name: {"value": value} for name, value in examples.items()}
    content = {media_type: {"schema": schema, **({"examples": shown} if shown else {})}}
    return {"requestBody": {"required": True, "description": description, "content": content}}


JOB_BODY = takes(
    "application/json",
    ref("JobSpec"),
    "The specification; only `data.train` is required. At most 1 MiB.",
    {
        "least": {"data": {"train": "recipes.jsonl"}},
        "chef": {
            "name": "chef",
            "model": "google/flan-t5-xl",
            "data": {
                "train": "dataset:recipes.jsonl",
                "validation": 0.01,
                "input": "{title}",
                "target": "{directions}",
            },
            "training": {"epochs": 5, "batch_size": 128, "learning_rate": 1e-4},
            "metadata": {"team": "kitchen"},
        },
    },
)
SWEEP_BODY = takes(
    "application/json",
    ref("SweepSpec"),
    "A job, and the settings in which its trials differ; `job` and `space` are required. At most 1 MiB.",
    {
        "learning rates": {
            "job": {"data": {"train": "recipes.jsonl"}},
            "space": {"training.learning_rate": {"range": [1e-5, 1e-3], "log": True}},
            "max_trials": 12,
        },
        "a grid": {
            "name": "banking",
            "job": {
                "model": "microsoft/deberta-v3-base",
                "task": "classification",
                "data": {"train": "banking.csv", "input": "{text}", "target": "{intent}"},
            },
            "space": {"training.batch_size": [16, 32], "training.learning_rate": [1e-5, 3e-5]},
            "sampler": "grid",
            "metric": "accuracy",
            "seeds": 3,
        },
    },
)
REPEAT_BODY = takes(
    "application/json",
    ref("Repetition"),
    "Which trial, and how many seeds; without a body the best one with five.",
    {"the best": {}, "another": {"trial": 7, "seeds": 3}},
)
REPEAT_BODY["requestBody"]["required"] = False
EXPORT_BODY = takes(
    "application/json",
    ref("ExportRequest"),
    "The format, and the type of its weights.",
    {"for CTranslate2": {"format": "ctranslate2", "dtype": "int8"}, "for llama.cpp": {"format": "gguf"}},
)
PUSH_BODY = takes(
    "application/json",
    ref("PushRequest"),
    "Where to, and under which licence.",
    {"private": {"repository": "kitchen/chef", "license": "apache-2.0"}},
)
CLONE_BODY = takes(
    "application/merge-patch+json",
    {"type": "object"},
    "A JSON merge patch (RFC 7396) of the job's specification: a value replaces, null restores the default, "
    "and `{}` changes nothing.",
    {"the same": {}, "slower": {"name": "slower", "training": {"learning_rate": 5e-5}}},
)
CLONE_BODY["requestBody"]["required"] = False
CLONE_BODY["requestBody"]["content"]["application/json"] = CLONE_BODY["requestBody"]["content"][
    "application/merge-patch+json"
]
PRIORITY_BODY = takes(
    "application/json",
    {
        "type": "object",
        "properties": {
            "priority": {"type": "integer", "minimum": -100, "maximum": 100, "description": "Higher runs first."}
        },
        "required": ["priority"],
        "additionalProperties": False,
    },
    "What changes.",
    {"first": {"priority": 5}},
)
RESUME_BODY = takes(
    "application/json",
    {
        "type": "object",
        "properties": {
            "from_scratch": {
                "type": "boolean",
                "default": False,
                "description": "Begin again at step 0, from the model's original weights. Every checkpoint of the job "
                "is removed, including one taken over by `resume_from`.",
            }
        },
        "additionalProperties": False,
    },
    "Without a body the job resumes from its newest checkpoint.",
    {"from the newest checkpoint": {}, "from step 0": {"from_scratch": True}},
)
RESUME_BODY["requestBody"]["required"] = False
GENERATE_BODY = takes(
    "application/json",
    ref("GenerateBody"),
    "What to answer, and how. At most 1 MiB.",
    {
        "a text": {"input": "Roasted Peach Ice Cream"},
        "a row of columns": {"row": {"title": "Roasted Peach Ice Cream"}, "base": True},
        "a chat": {"messages": [{"role": "user", "content": "What is in it?"}], "temperature": 0.7, "stream": True},
    },
)
CHAT_BODY = takes(
    "application/json",
    ref("ChatBody"),
    "As OpenAI takes it; a key that would change the reply otherwise is refused.",
    {
        "a chat": {
            "model": "ft:job-06e1m8c4f0zt3qk5x9wb",
            "messages": [{"role": "user", "content": "What is in it?"}],
        }
    },
)
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The file: JSON lines, CSV or Parquet, as its name says.",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

# -- answers that are no JSON ------------------------------------------------------------------------------------------

LOCATION: dict[str, Any] = {
    "Location": {"description": "Path of what was created.", "required": True, "schema": {"type": "string"}}
}
EVENT_STREAM: Responses = {
    200: {
        "description": "Events in order: a page of them, or with `Accept: text/event-stream` all of them, live.",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "description": "One server-sent event. A comment is sent while nothing happens. The stream ends "
                    "after the job's last event; if the connection breaks before, reconnect with `Last-Event-ID`, "
                    "and nothing is lost.",
                    "properties": {
                        "id": {"type": "string", "description": "The event's number."},
                        "event": {"type": "string", "description": "Its type."},
                        "data": {
                            "type": "string",
                            "contentMediaType": "application/json",
                            "contentSchema": ref("Event"),
                            "description": "The event as JSON.",
                        },
                    },
                    "required": ["id", "event", "data"],
                },
                "example": ": following\n\nid: 2\nevent: job.checked\ndata: {…}\n\n: keep-alive\n\n",
            }
        },
    },
    204: {"description": "Stream only: the job has ended and no more events follow. Do not reconnect."},
}


def _server_sent(*fields: str) -> dict[str, Any]:
    """One server-sent event, with these fields."""
    return {
        "type": "object",
        "description": "One server-sent event.",
        "properties": {name: {"type": "string"} for name in fields},
        "required": list(fields),
    }


GENERATE_STREAM: Responses = {
    200: {
        "description": "The whole answer; or with `stream` its parts as server-sent events: `waiting` (how many "
        "requests are `ahead` at most), `loading`, `loaded`, `text` (a piece as it is written), `output` (one whole), "
        "and at the end `done` with the whole answer, or `error` with the `status` that it would have been answered "
        "with.",
        "content": {
            "text/event-stream": {
                "schema": _server_sent("event", "data"),
                "example": 'event: text\ndata: {"model": "trained", "index": 0, "text": "Preheat the"}\n\n',
            }
        },
    },
}
CHAT_STREAM: Responses = {
    200: {
        "description": "The reply; or with `stream` its chunks as server-sent events, `[DONE]` the last.",
        "content": {
            "text/event-stream": {
                "schema": _server_sent("data"),
                "example": 'data: {"object": "chat.completion.chunk", …}\n\ndata: [DONE]\n\n',
            }
        },
    },
}
NEXT_OFFSET: dict[str, Any] = {
    "X-Next-Offset": {
        "description": "Byte of the log where this answer ends: `offset` of the next request.",
        "schema": {"type": "integer", "minimum": 0},
    }
}


def file_answer() -> Responses:
    """A file, or a folder's tar; whole or a range of it."""
    content: dict[str, Any] = {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}, "*/*": {}}
    length = {"Content-Length": {"description": "Bytes of this answer.", "schema": {"type": "integer"}}}
    ranges = {
        "Accept-Ranges": {"description": "Always `bytes`.", "schema": {"type": "string"}},
        "ETag": {"description": "Changes with the content; use it in `If-Range`.", "schema": {"type": "string"}},
        "Content-Disposition": {"description": "Name to save it under.", "schema": {"type": "string"}},
    }
    part = {"Content-Range": {"description": "`bytes <first>-<last>/<size>`.", "schema": {"type": "string"}}}
    return {
        200: {"description": "The file as it is, or the folder's tar.", "content": content, "headers": length | ranges},
        206: {"description": "The part that `Range` asks for.", "content": content, "headers": length | ranges | part},
    }
