"""Every error that the service answers with: what its status means, and an example of each code."""

from __future__ import annotations

import json
from typing import Any

from service.errors import error_response

MEANINGS = {
    401: "The API key is missing or wrong.",
    403: "Without an API key only programs of this machine may ask, and no web page of another host.",
    404: "There is no such thing.",
    408: "The body does not come.",
    409: "The present state does not allow it.",
    413: "The body is too large.",
    416: "The file has no such range.",
    422: "The request is wrong; `param` says where.",
    429: "Too many requests or streams: wait as long as `Retry-After` says.",
    500: "A fault of the service; its log says more.",
    503: "Redis does not answer, or the disk is full. Nothing was changed: try again.",
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
            "message": "a web page of another host asked, or this service was asked for under another name",
            "hint": "use http://127.0.0.1 or localhost, or set LONGHAUL_API_KEY",
        }
    },
    404: {
        "not_found": {"message": f"there is no job {_JOB}"},
        "no_plan": {"message": f"job {_JOB} has no plan.json yet: check writes it, and prepare writes it again"},
        "no_file": {"message": f"job {_JOB} has no file 'model/config.json'"},
    },
    408: {"body_too_slow": {"message": "the body was not here after 60 s"}},
    409: {
        "conflict": {"message": f"job {_JOB} is succeeded already: there is nothing to cancel"},
        "dataset_exists": {
            "message": "data set recipes.jsonl exists with other content (2,210 bytes), and a data set never changes: "
            "take another name, or delete it first"
        },
        "dataset_in_use": {
            "message": f"data set recipes.jsonl is needed by 1 open jobs ({_JOB}): cancel them first, or wait"
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
            "message": "schedule.epochs: Input should be greater than or equal to 1 (got 0)",
            "param": "schedule.epochs",
        },
        "invalid_json": {
            "message": "the body is not JSON: Expecting value at line 1, column 10",
            "hint": "send the job file as it is, with Content-Type: application/json",
        },
        "checksum_mismatch": {
            "message": "2,210 bytes came with sha256 9f86d0…, and Content-Digest says another",
            "param": "Content-Digest",
            "hint": "it was changed on its way, or while it was read: send it again",
        },
    },
    429: {
        "rate_limited": {"message": "more than 300 requests a second from one key", "hint": "wait 2 s"},
        "too_many_streams": {
            "message": "1000 streams are open, and there may be no more",
            "hint": "close some, or come back in 10 s",
        },
    },
    500: {"internal_error": {"message": "this is a fault of the service; its log says more"}},
    503: {
        "store_unavailable": {"message": "Redis does not answer; nothing was changed. Try again."},
        "disk_full": {"message": "the disk takes no more: nothing was changed", "hint": "make room and retry"},
        "not_ready": {"message": "Redis does not answer", "param": "redis"},
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
        code: {"value": json.loads(bytes(error_response(status, code, **said).body))}
        for code, said in _EXAMPLES[status].items()
    }
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}, "examples": examples}}
    return {"description": MEANINGS[status], "content": content, "headers": _HEADERS.get(status, {})}
