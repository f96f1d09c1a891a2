"""The path of somebody whose model is done: is it any good, how do I try it, how do I take it away?

With the command, with curl, and from Python; the hub is a small server on loopback.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import ctranslate2
import pytest
import torch
from transformers import AutoTokenizer

from tests.e2e.conftest import LONGHAUL, TOKEN
from tests.support.local import Local
from tests.training.hub_server import Hub

WORDS = ["bread", "soup", "cake", "salad", "pasta", "stew", "rice", "curry"]
TUNED = {
    "name": "tuned",
    "model": "builtin:t5-tiny",
    "data": {"train": "orders.jsonl", "validation": "later.jsonl"},
    "training": {"epochs": 20, "batch_size": 16, "learning_rate": 0.003, "early_stopping": {"patience": 4}},
    "evaluation": {"every_steps": 20, "samples": 2},
    "checkpoint": {"best": "chrf"},
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """CTranslate2 sets the number of OpenMP's threads, which are torch's, too."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def orders(first: int, count: int) -> str:
    """Answers that follow from what is asked."""
    rows = ((WORDS[number % len(WORDS)], number) for number in range(first, first + count))
    return "".join(
        json.dumps({"input": f"Table {number} wants {word}", "target": f"One {word} for you"}) + "\n"
        for word, number in rows
    )


def said(local: Local, *command: str) -> str:
    """What a command prints; it has to succeed."""
    done = subprocess.run(command, cwd=local.folder, env=local.environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{local.output()}"
    return done.stdout


def curled(local: Local, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON that curl prints."""
    sent = [] if body is None else ["-d", json.dumps(body)]
    return json.loads(said(local, "curl", "-sSf", f"{local.url}{path}", *sent))


def test_a_model_is_judged_tried_and_taken_away(local: Local, hub: Hub) -> None:
    (local.folder / "data" / "orders.jsonl").write_text(orders(0, 160))
    (local.folder / "data" / "later.jsonl").write_text(orders(500, 32))
    (local.folder / "tuned.json").write_text(json.dumps(TUNED))
    # Is it any good?
    shown = said(local, LONGHAUL, "submit", "tuned.json", "--watch")
    assert "better than the untrained base model" in " ".join(shown.split())
    job = json.loads(said(local, LONGHAUL, "show", "last", "--json"))
    verdict = curled(local, f"/jobs/{job['id']}")["verdict"]
    assert (verdict["metric"], verdict["outcome"]) == ("chrf", "better")
    assert verdict["against_base"]["low"] > 0 and job["chosen_by"] == "chrf"

    # And on rows that this job never saw?
    (local.folder / "data" / "new.jsonl").write_text(orders(900, 40))
    other = {"name": "again", "kind": "evaluate", "model": job["id"], "data": {"train": "new.jsonl"}}
    (local.folder / "again.json").write_text(json.dumps(other))
    evaluated = json.loads(said(local, LONGHAUL, "submit", "again.json", "--json"))["id"]
    assert "evaluated" in said(local, LONGHAUL, "watch", evaluated)
    [measured] = [event["data"] for event in local.api.past_events(evaluated) if event["type"] == "evaluation.finished"]
    assert measured["rows"] == 40 and measured["metrics"]["chrf"] > 50
    assert local.api.get(evaluated)["fine_tuned_model"] is None

    # How do I try it?
    asked = "Table 7 wants curry"
    by_command = said(local, LONGHAUL, "try", job["id"], asked).strip()
    assert by_command.startswith("One ")
    by_curl = curled(local, f"/jobs/{job['id']}/generate", {"input": asked})["outputs"][0]["text"]
    in_python = local.api.generate(job["id"], {"input": asked})["outputs"][0]["text"]
    assert by_curl == in_python and by_command.startswith(in_python)
    (local.folder / "asked.jsonl").write_text(orders(700, 12))
    said(local, LONGHAUL, "predict", job["id"], "asked.jsonl", "--out", "answers.jsonl")
    assert len((local.folder / "answers.jsonl").read_text().splitlines()) == 12

    # How do I take it away?
    said(local, LONGHAUL, "export", job["id"], "--to", "ctranslate2")
    [export] = [each for each in curled(local, f"/jobs/{job['id']}/exports")["data"] if each["format"] == "ctranslate2"]
    folder = local.folder / "runs" / job["id"] / "exports" / "ctranslate2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(asked)["input_ids"])
    translator = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    [best] = translator.translate_batch([tokens], beam_size=1)
    written = tokenizer.decode(tokenizer.convert_tokens_to_ids(best.hypotheses[0]), skip_special_tokens=True)
    assert written == in_python, export
    pushed = said(local, LONGHAUL, "push", job["id"], "cooks/tuned", "--license", "apache-2.0")
    assert "cooks/tuned" in pushed and hub.created["cooks/tuned"] is True, "private"
    [commit] = hub.commits
    page = commit["README.md"].decode()
    assert "license: apache-2.0" in page and "better than the untrained base model" in page
    report = said(local, LONGHAUL, "report", job["id"], "--out", "report.html")
    text = (local.folder / "report.html").read_text()
    assert "report.html" in report and "better than the untrained base model" in text and len(text) < 1_000_000
    assert TOKEN not in text + page + said(local, LONGHAUL, "logs", job["id"]) + local.output()
