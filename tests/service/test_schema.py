"""The OpenAPI document: checked in, complete, and true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from service import schema
from service.main import create_app
from service.settings import Settings
from tests.service.contract import Contract


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract(create_app(Settings()))


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and description of each."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_the_document_checked_in_is_what_the_routes_say() -> None:
    assert schema.FILE.read_text() == schema.text(), "run `make openapi` and look at the difference"


def test_it_says_what_differs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schema, "FILE", tmp_path / "openapi.json")
    assert schema.main(["--check"]) == 1
    assert "make openapi" in capsys.readouterr().err
    assert schema.main([]) == 0
    assert schema.main(["--check"]) == 0


def test_every_operation_says_what_it_is(contract: Contract) -> None:
    for name, operation in operations(contract.document):
        assert operation["tags"][0] in {tag["name"] for tag in contract.document["tags"]}, name
        assert operation["description"], name
        for parameter in operation.get("parameters", []):
            assert parameter["description"], (name, parameter["name"])
        if "requestBody" in operation:
            assert operation["requestBody"]["description"], name


def test_every_field_of_an_answer_is_described(contract: Contract) -> None:
    silent = [
        f"{name}.{key}"
        for name, described in contract.document["components"]["schemas"].items()
        for key, property in described.get("properties", {}).items()
        if not property.get("description") and not _named(contract, property)
    ]
    assert silent == []


def _named(contract: Contract, property: dict[str, Any]) -> bool:
    """Whether it says what it is by the schema that it refers to, alone or as list."""
    refers = property.get("$ref") or property.get("items", {}).get("$ref", "")
    return bool(refers)


def test_every_error_has_the_one_shape_and_an_example(contract: Contract) -> None:
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


def test_examples_fit_their_schemas(contract: Contract) -> None:
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
