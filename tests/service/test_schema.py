"""The OpenAPI document and the reference: checked in, complete, and true."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from jobs.events import EVENT_TYPES
from jobs.metrics import MetricRow
from jobs.spec import JobSpec
from service.docs import schema
from tests.service.contract import Document, document_of_the_service


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return schema.files()


@pytest.fixture(autouse=True)
def _made_once(pages: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "files", lambda: pages)


@pytest.fixture
def contract() -> Document:
    return document_of_the_service()


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and description of each."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_the_pages_checked_in_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main(["--check"]) == 0, capsys.readouterr().err


def test_the_check_names_the_pages_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schema, "ROOT", tmp_path)
    assert schema.main(["--check"]) == 1
    missing = capsys.readouterr().err
    assert "docs/openapi.json" in missing and "docs/reference/job.md" in missing and "make openapi" in missing
    assert schema.main([]) == 0
    assert schema.main(["--check"]) == 0
    (tmp_path / "docs" / "reference" / "old.md").write_text("")
    assert schema.main(["--check"]) == 1
    assert "docs/reference/old.md" in capsys.readouterr().err


def test_the_reference_has_every_key_event_metric_route_and_variable(pages: dict[str, str]) -> None:
    for page, names in {
        "job.md": keys(JobSpec),
        "events.md": EVENT_TYPES,
        "metrics.md": MetricRow.model_fields,
        "environment.md": re.findall(r"^([A-Z_]+)=", pages[schema.EXAMPLE], re.MULTILINE),
        "api.md": [name for name, _ in operations(json.loads(pages["docs/openapi.json"]))],
    }.items():
        assert names and [name for name in names if f"`{name}`" not in pages[f"docs/reference/{page}"]] == []


def test_every_row_of_the_reference_has_a_meaning(pages: dict[str, str]) -> None:
    silent = [
        (page, line)
        for page, text in pages.items()
        for line in text.splitlines()
        if line.startswith("| `") and line.endswith(" |  |") and page != "docs/reference/errors.md"
    ]
    assert silent == []


def keys(part: type[BaseModel], prefix: str = "") -> list[str]:
    """Dotted keys of all values in a part of a job."""
    found: list[str] = []
    for name, field in part.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        parts = [kind for kind in inner if issubclass(kind, BaseModel)]
        found += keys(parts[0], f"{prefix}{name}.") if parts else [f"{prefix}{name}"]
    return found


def test_every_operation_says_what_it_is(contract: Document) -> None:
    for name, operation in operations(contract.document):
        assert operation["tags"][0] in {tag["name"] for tag in contract.document["tags"]}, name
        assert operation["description"], name
        for parameter in operation.get("parameters", []):
            assert parameter["description"], (name, parameter["name"])
        if "requestBody" in operation:
            assert operation["requestBody"]["description"], name


def test_every_field_of_an_answer_is_described(contract: Document) -> None:
    silent = [
        f"{name}.{key}"
        for name, described in contract.document["components"]["schemas"].items()
        for key, property in described.get("properties", {}).items()
        if not property.get("description") and not _named(contract, property)
    ]
    assert silent == []


def _named(contract: Document, property: dict[str, Any]) -> bool:
    """Whether it says what it is by the schema that it refers to, alone or as list."""
    refers = property.get("$ref") or property.get("items", {}).get("$ref", "")
    return bool(refers)


def test_every_error_has_the_one_shape_and_an_example(contract: Document) -> None:
    for name, operation in operations(contract.document):
        method, path = name.split()
        for status in operation["responses"]:
            response = contract.response(path, method, int(status))
            assert response is not None and response["description"], (name, status)
            if int(status) < 400:
                continue
            content = response["content"]["application/json"]
            assert content["schema"] == {"$ref": "#/components/schemas/ErrorResponse"}, (name, status)
            for example in content["examples"].values():
                contract.validator(content["schema"]).validate(example["value"])


def test_examples_fit_their_schemas(contract: Document) -> None:
    for name, described in contract.document["components"]["schemas"].items():
        for example in described.get("examples", []):
            contract.validator({"$ref": f"#/components/schemas/{name}"}).validate(example)
    for _, operation in operations(contract.document):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            for example in content.get("examples", {}).values():
                contract.validator(content["schema"]).validate(example["value"])
        for parameter in operation.get("parameters", []):
            for example in parameter["schema"].get("examples", []):
                contract.validator(parameter["schema"]).validate(example)
