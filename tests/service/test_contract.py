"""The middleware that holds every answer of these tests against the OpenAPI document sees what is wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel

from service.errors import error_response
from service.openapi import document
from service.openapi.documented import documented
from tests.service.contract import Contract, Document


class Thing(BaseModel):
    """What is documented."""

    size: int


ANSWERS = {
    "right": JSONResponse({"size": 3}, headers={"X-Request-Id": "a"}),
    "no header": JSONResponse({"size": 3}),
    "another status": JSONResponse({"size": 3}, status_code=418, headers={"X-Request-Id": "a"}),
    "another type": PlainTextResponse("3", headers={"X-Request-Id": "a"}),
    "another shape": JSONResponse({"size": "three"}, headers={"X-Request-Id": "a"}),
    "another code": error_response(404, "strange", "it is strange", headers={"X-Request-Id": "a"}),
    "another error": JSONResponse({"detail": "no"}, status_code=404, headers={"X-Request-Id": "a"}),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("right", ""),
        ("no header", "no header X-Request-Id"),
        ("another status", "418: undocumented status"),
        ("another type", "text/plain is not documented"),
        ("another shape", "$.size: 'three' is not of type 'integer'"),
        ("another code", "404: undocumented code strange"),
        ("another error", "404: $: 'error' is a required property"),
    ],
)
def test_an_answer_that_is_not_as_documented_is_found(name: str, wrong: str) -> None:
    app = FastAPI(generate_unique_id_function=document.operation_id)

    @app.get("/things/{thing}", response_model=Thing, responses=documented(404), tags=["jobs"])
    def get_thing(thing: str) -> Response:
        """One of them."""
        return ANSWERS[thing]

    contract = Contract(app, Document(document.document(app, examples={})))
    asyncio.run(ask(contract, f"/things/{name}"))
    broken = contract.broken()
    assert any(wrong in line for line in broken) == bool(wrong) == bool(broken), broken


async def ask(app: Any, path: str) -> None:
    """GET, by the protocol that servers speak to applications."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: Any) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "query_string": b"", "headers": []}
    await app(scope, receive, send)
