"""What the service answers, held against its own OpenAPI document: status, content type, headers and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fastapi import FastAPI
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from starlette.types import Message, Receive, Scope, Send

from service.edge.limits import SIGN_IN, STATIC
from service.errors import wants_page
from service.main import create_app
from service.settings import ServiceSettings

ITEMS = 20
"""Items of a list that are looked at: they are all made by the same lines."""
OF_EACH = 20
"""Answers of one operation and status that are looked at."""
OF_PAGES = (STATIC, SIGN_IN, "/sign-out")
_NOWHERE = {401, 403, 404, 405, 429, 503}
"""What may be said to requests that no operation takes."""


@dataclass
class ContractAnswer:
    """One answer, as it was sent."""

    status: int
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False


class Document:
    """The OpenAPI document of an application, and what it says of paths, answers and schemas."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        # The path of a file is the one parameter that may hold a slash.
        self._paths = [
            (re.compile(re.sub(r"\\{(\w+)\\}", _parameter, re.escape(path)), re.DOTALL), path)
            for path in sorted(document["paths"], key=lambda path: path.count("{"))
        ]
        self._registry: Registry[Any] = Registry().with_resource("urn:api", DRAFT202012.create_resource(document))

    def operation(self, path: str, method: str) -> tuple[str, str]:
        """Path of the document ('' where it has none) and method, HEAD being a GET."""
        method = "GET" if method == "HEAD" else method
        for pattern, template in self._paths:
            if pattern.fullmatch(path):
                return (template if method.lower() in self.document["paths"][template] else ""), method
        return "", method

    def response(self, path: str, method: str, status: int) -> dict[str, Any] | None:
        """What is documented of it; None: nothing."""
        described: dict[str, Any] | None = self.document["paths"][path][method.lower()]["responses"].get(str(status))
        if described and "$ref" in described:
            described = self.document["components"]["responses"][described["$ref"].rpartition("/")[2]]
        return described

    def header(self, described: dict[str, Any]) -> dict[str, Any]:
        """What a header is, where it is only named, too."""
        name = described.get("$ref", "").rpartition("/")[2]
        header: dict[str, Any] = self.document["components"]["headers"][name] if name else described
        return header

    def invalid(self, schema: dict[str, Any], body: Any) -> list[str]:
        """What of this body is not as its schema says; of a long list only the first items are looked at."""
        if isinstance(body, dict) and isinstance(body.get("data"), list):
            body = body | {"data": body["data"][:ITEMS]}
        return [f"{error.json_path}: {error.message[:300]}" for error in self.validator(schema).iter_errors(body)]

    def validator(self, schema: dict[str, Any]) -> Draft202012Validator:
        """For a schema of the document."""
        return Draft202012Validator(_absolute(schema), registry=self._registry)


@cache
def document_of_the_service() -> Document:
    """Made once a process: no setting changes it, and it takes longer than most tests."""
    return Document(create_app(ServiceSettings()).openapi())


class Contract:
    """ASGI middleware around the whole application: remembers answers; `broken` says which are not as documented."""

    def __init__(self, app: FastAPI, document: Document, path: str = "") -> None:
        """`path` is what a proxy has before those of the service."""
        self._app = app
        self._document, self._path = document, path
        self.seen: dict[tuple[str, str, int], list[ContractAnswer]] = {}
        """By path of the document ('' where it has none), method and status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and remember; not so pages and what belongs to them, which the document does not have."""
        path = scope.get("path", "").removeprefix(self._path)
        if scope["type"] == "http" and (wants_page(scope) or path.startswith(OF_PAGES)):
            await self._app(scope, receive, send)
            return
        answer: ContractAnswer | None = None

        async def remember(message: Message) -> None:
            nonlocal answer
            if message["type"] == "http.response.start":
                headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                answer = ContractAnswer(message["status"], headers)
                key = (*self._document.operation(path, scope["method"]), answer.status)
                known = self.seen.setdefault(key, [])
                if len(known) < OF_EACH:
                    known.append(answer)
            elif answer is not None and answer.headers.get("content-type") == "application/json":
                answer.body += message.get("body", b"")
                answer.complete = not message.get("more_body", False)
            await send(message)

        await self._app(scope, receive, remember if scope["type"] == "http" else send)

    def broken(self) -> list[str]:
        """A line for each answer that is not as documented."""
        seen = [(path, method, list(answers)) for (path, method, _), answers in list(self.seen.items())]
        return sorted(
            {line for path, method, answers in seen for each in answers for line in self._broken(path, method, each)}
        )

    def _broken(self, path: str, method: str, answer: ContractAnswer) -> list[str]:
        name = f"{method} {path or '(no operation)'} {answer.status}"
        if not path:
            if answer.status not in _NOWHERE and not (method == "GET" and answer.status == 200):  # the document itself
                return [f"{name}: not what is said to requests that no operation takes"]
            return []
        documented = self._document.response(path, method, answer.status)
        if documented is None:
            return [f"{name}: undocumented status"]
        wrong = [
            f"{name}: no header {header}"
            for header, described in documented["headers"].items()
            if self._document.header(described).get("required") and header.lower() not in answer.headers
        ]
        content = documented.get("content", {})
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if content and kind not in content and "*/*" not in content:
            return [*wrong, f"{name}: {kind or 'no content type'} is not documented"]
        if (
            kind == "application/json" and kind in content and answer.complete and answer.body
        ):  # else: a file, or a part
            body = json.loads(answer.body)
            wrong += [f"{name}: {each}" for each in self._document.invalid(content[kind]["schema"], body)]
            if answer.status >= 400 and not wrong and (code := body["error"]["code"]) not in content[kind]["examples"]:
                wrong.append(f"{name}: undocumented code {code}")
        return wrong


def _parameter(match: re.Match[str]) -> str:
    return ".+" if match[1] == "path" else "[^/]+"


def _absolute(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: f"urn:api{each}" if key == "$ref" else _absolute(each) for key, each in schema.items()}
    return [_absolute(each) for each in schema] if isinstance(schema, list) else schema
