"""Types to the edge: where a dictionary of anything may stand, and why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.stack import ROOT

SCHEMA = "a part of the OpenAPI document, which is a JSON document"
MODEL_CONFIG = "config.json or tokenizer.json of a model: others write it"
KEYWORDS = "keyword arguments of somebody else's function"
ROW = "columns of a row: others write it"
PASSED_ON = "keys of a request or parts of an answer, passed on as they are"
REASONS = {
    "jobs/answers.py": "JsonObject: documents that are passed on",
    "jobs/generation.py": ROW,
    "jobs/record.py": "fields of a record that an event changes",
    "jobs/sweeps/space.py": "values of a job's keys",
    "jobs/sweeps/spec.py": "a job file that trials are made of",
    "jobs/text/schemas.py": "a JSON schema, which is a JSON document",
    "longhaul/demo.py": "JsonObject: a job file",
    "longhaul/jobfile.py": "JsonObject: a job file",
    "longhaul/api.py": "JsonObject: plan.json; keys of a request and parts of an answer are passed on as they are",
    "longhaul/commands/submitting.py": "JsonObject: a job file",
    "longhaul/commands/trying.py": PASSED_ON,
    "longhaul/sweep_tables.py": "JsonObject: settings of a trial",
    "longhaul/commands/sweeping.py": "JsonObject: a sweep file",
    "longhaul/plan.py": "JsonObject: a job file",
    "longhaul/predicting.py": ROW,
    "service/answers/__init__.py": KEYWORDS,
    "service/docs/reference.py": SCHEMA,
    "service/edge/body.py": "a body, before it is looked at",
    "service/edge/connections.py": KEYWORDS,
    "service/generation/openai.py": PASSED_ON,
    "service/openapi/document.py": SCHEMA,
    "service/openapi/documented.py": SCHEMA,
    "service/openapi/examples.py": SCHEMA,
    "service/pages/job_form.py": "a JSON schema, which is a JSON document",
    "service/pages/trial_charts.py": "values of a job's keys",
    "worker/generation.py": PASSED_ON,
    "worker/suggestions.py": "values of a job's keys",
    "worker/training/checkpoints/checkpoint.py": "states of random generators",
    "worker/training/doctor/random_t5.py": MODEL_CONFIG,
    "worker/training/generation/serving.py": PASSED_ON,
    "worker/training/generation/writing.py": KEYWORDS,
    "worker/training/export/gguf_file.py": MODEL_CONFIG,
    "worker/training/models/hub.py": MODEL_CONFIG,
    "worker/training/models/model_files.py": MODEL_CONFIG,
    "worker/training/planning/kernels.py": KEYWORDS,
    "worker/training/planning/ladder.py": KEYWORDS,
    "worker/training/planning/tracker.py": KEYWORDS,
    "worker/training/rows/hub_data.py": "what a data set on the hub says of itself: others write it",
    "worker/training/rows/row.py": KEYWORDS,
    "worker/training/steps/randomness.py": "states of random generators",
    "worker/training/tasks/causal/builtin.py": MODEL_CONFIG,
    "worker/training/tasks/causal/chat.py": KEYWORDS,
    "worker/training/tasks/causal/layout.py": MODEL_CONFIG,
    "worker/training/tasks/classification/builtin.py": MODEL_CONFIG,
    "worker/training/tasks/classification/layout.py": MODEL_CONFIG,
    "worker/training/tasks/seq2seq/builtin.py": MODEL_CONFIG,
}


def is_untyped(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node) in ("dict[str, Any]", "typing.Dict[str, Any]")


def aliases(tree: ast.Module) -> set[str]:
    """Names of what is only another name of it, or holds it."""
    made = [node for node in tree.body if isinstance(node, ast.Assign) and any(map(is_untyped, ast.walk(node.value)))]
    return {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}


def uses(tree: ast.Module, names: set[str]) -> int:
    """How often it stands in a file, under its own name or under one of these."""
    return sum(is_untyped(node) or (isinstance(node, ast.Name) and node.id in names) for node in ast.walk(tree))


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("def told(about: dict[str, Any]) -> list[dict[str, Any]]: ...", 2),
        ("Said = dict[str, Any]\nheard: Said", 3),
        ("about: dict[str, object]", 0),
    ],
)
def test_uses_are_found_under_every_name(code: str, found: int) -> None:
    tree = ast.parse(code)
    assert uses(tree, aliases(tree)) == found


def test_no_reader_digs_in_a_dictionary_of_anything() -> None:
    files = [file for root in ("jobs", "longhaul", "service", "worker") for file in sorted((ROOT / root).rglob("*.py"))]
    trees = {file.relative_to(ROOT).as_posix(): ast.parse(Path(file).read_text()) for file in files}
    names = set().union(*map(aliases, trees.values()))
    assert {name for name, tree in trees.items() if uses(tree, names)} == REASONS.keys()
