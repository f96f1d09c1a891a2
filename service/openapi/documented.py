"""How routes add to the OpenAPI document what their answer models do not say: parameters, bodies, errors.

    @router.get("/{job}", responses=documented(404))
    def get_job(job: JobId) -> answers.Job:

The schemas referred to here are put into the document by `service/openapi/document.py`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Header, Path

from jobs.comparison.answer import FEWEST, MOST
from jobs.metrics import MetricRow
from service.errors import error_response

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


# -- error answers -----------------------------------------------------------------------------------------------------
# Every error that the service answers with: what its status means, and an example of each code.

MEANINGS = {
    401: "The API key is missing or wrong.",
    403: "Without an API key only programs on this machine have access, and no web page of another origin.",
    404: "It does not exist.",
    408: "The body did not arrive in time.",
    409: "The current state does not allow it.",
    413: "The body is too large.",
    416: "The file has no such range.",
    422: "The request is wrong; `param` says where.",
    429: "Too many requests or streams: wait as long as `Retry-After` says.",
    500: "An internal error; the service's log has the details.",
    503: "Redis does not answer or does not know all jobs yet, or the disk is full or not writable, or a file that "
    "the request needs cannot be read. Nothing was changed: try again.",
}
_JOB = "job-06e1m8c4f0zt3qk5x9wb"
_EXAMPLES: dict[int, dict[str, dict[str, Any]]] = {
    401: {
        "invalid_api_key": {
            "message": "an API key is needed",
            "hint": "send the header `Authorization: Bearer …` with a key of the service",
        }
    },
    403: {
        "foreign_origin": {
            "message": "the web page 'http://localhost:3000' asked through a browser; without an API key only "
            "http://localhost:8000 itself may",
            "hint": "ask from a program such as curl, or set LONGHAUL_API_KEY for the service",
        }
    },
    404: {
        "not_found": {"message": f"there is no job {_JOB}"},
        "no_plan": {"message": f"job {_JOB} has no plan.json yet: check writes it, and prepare writes it again"},
        "no_file": {"message": f"job {_JOB} has no file 'model/config.json'"},
        "no_push": {"message": f"nobody has asked for an upload of job {_JOB} in the last minutes"},
    },
    408: {"body_too_slow": {"message": "the body did not arrive within 1 min"}},
    409: {
        "conflict": {"message": f"job {_JOB} has already ended (succeeded): there is nothing to cancel"},
        "damaged": {
            "message": f"job {_JOB} is damaged: line 7 of events.jsonl is not an event: its CRC does not match",
            "hint": f"`longhaul repair {_JOB}` keeps the 6 events before it, after a backup",
        },
        "newer_format": {
            "message": f"job {_JOB} is damaged: line 1 of events.jsonl cannot be read: a newer version of Longhaul "
            "wrote it (the run directory has format 2); this is 0.2.0, which reads up to format 1",
            "hint": "run Longhaul 9.1.0: nothing is lost",
        },
        "no_checkpoint": {
            "message": f"no checkpoint of job {_JOB} is there yet",
            "hint": f"`longhaul checkpoints {_JOB}` lists those that it has",
        },
        "no_model": {
            "message": f"job {_JOB} has no model yet",
            "hint": f"wait for its end, or name a checkpoint: `longhaul checkpoints {_JOB}` lists those that it has",
        },
        "nothing_to_merge": {
            "message": f"model/ of job {_JOB} is the whole model already",
            "hint": f"`longhaul export {_JOB} --to ctranslate2` or `longhaul download {_JOB}` for model/ as it is",
        },
        "no_adapter": {
            "message": f"job {_JOB} trained every weight: it has no adapter",
            "hint": f"`longhaul export {_JOB} --to ctranslate2` or `longhaul download {_JOB}` for model/ as it is",
        },
        "export_unsupported": {
            "message": "this model cannot be exported to gguf: it is not a causal model",
            "hint": f"`longhaul export {_JOB} --to ctranslate2` or `longhaul download {_JOB}` for model/ as it is",
        },
        "dataset_exists": {
            "message": "data set recipes.jsonl exists with other content (2,210 bytes), and a data set never changes: "
            "take another name, or delete it first"
        },
        "dataset_in_use": {
            "message": f"data set recipes.jsonl is needed by 1 open job ({_JOB}): cancel them first, or wait"
        },
    },
    413: {"body_too_large": {"message": "the body is larger than 1,048,576 bytes; a job is a few kilobytes"}},
    416: {
        "range_not_satisfiable": {
            "message": "bytes=9999- is beyond the end: there are 1530 bytes",
            "param": "Range",
        }
    },
    422: {
        "invalid_value": {
            "message": "training.epochs: must be greater than or equal to 1 (got 0)",
            "param": "training.epochs",
        },
        "invalid_json": {
            "message": "the body is not JSON: Expecting value at line 1, column 10",
            "hint": "send the job file as it is, with Content-Type: application/json",
        },
        "bad_input": {
            "message": "the input cannot be used: missing title",
            "hint": "give it as a row of the training data would be: `longhaul preview ID` shows some",
        },
        "input_too_long": {
            "message": "the input has 600 tokens, and the model knows 512 positions",
            "hint": "shorten it",
        },
        "checksum_mismatch": {
            "message": "2,210 bytes came with sha256 9f86d0…, but Content-Digest names another",
            "param": "Content-Digest",
            "hint": "it changed in transit or while it was read: send it again",
        },
    },
    429: {
        "rate_limited": {"message": "more than 300 requests a second from one key", "hint": "wait 2 s"},
        "queue_full": {
            "message": "32 requests of yours wait, which is the limit",
            "hint": "wait for answers, or try again in 5 s",
        },
        "too_many_streams": {
            "message": "1000 streams are open, which is the limit",
            "hint": "close some, or try again in 5 s",
        },
    },
    500: {"internal_error": {"message": "internal error; the service's log has the details"}},
    503: {
        "store_unavailable": {"message": "Redis does not answer; nothing was changed. Try again."},
        "recovering": {"message": "Redis was emptied and is being refilled; a list would be incomplete. Try again."},
        "disk_full": {"message": "the disk is full: nothing was changed", "hint": "make room and retry"},
        "not_permitted": {
            "message": "the service may not read or write a file that this request needs: nothing was changed",
            "hint": "its log names the file; the user that the service runs as must own it",
        },
        "unreadable": {
            "message": "metrics.jsonl cannot be opened or read: Is a directory",
            "hint": "the service's log has its path: restore it from a backup, or move it away",
        },
        "no_worker": {
            "message": "no worker `generate` is there to do it",
            "hint": "`longhaul local` and compose start one; by hand it is `python -m worker generate`",
        },
        "request_lost": {
            "message": "the request is lost: the worker that worked on it is gone",
            "hint": "ask again",
        },
        "model_process_ended": {
            "message": "the process that had the model was killed by signal 9 (has ended)",
            "hint": "ask again: it starts anew. If that repeats, the log of the worker `generate` has the details",
        },
        "worker_stopped": {
            "message": "the worker `generate` was stopped while it worked on this",
            "hint": "ask again once it runs",
        },
        "gpu_needed": {
            "message": "a job needs the GPU, and this was ended for it",
            "hint": "ask again: the model then runs on the CPU",
        },
        "not_ready": {"message": "Redis does not answer, or takes no writes", "param": "redis"},
    },
}
_RETRY_AFTER = {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {
        "WWW-Authenticate": {"description": "Always `Bearer`.", "required": True, "schema": {"const": "Bearer"}},
    },
    416: {"Content-Range": {"description": "`bytes */<size>`.", "required": True, "schema": {"type": "string"}}},
    429: _RETRY_AFTER,
    503: _RETRY_AFTER,
}


def error_answer(status: int) -> dict[str, Any]:
    """An error as the OpenAPI document describes it. Its examples are made as real answers are."""
    examples = {
        code: {"value": json.loads(bytes(error_response(status, code, **arguments).body))}
        for code, arguments in _EXAMPLES[status].items()
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}, "examples": examples}}
    return {"description": MEANINGS[status], "content": content, "headers": _HEADERS.get(status, {})}
