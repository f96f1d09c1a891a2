"""Every error that the service answers with: what its status means, and an example of each code."""

from __future__ import annotations

import json
from typing import Any

from service.errors import error_response

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
