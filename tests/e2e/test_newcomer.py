"""What a newcomer does: `longhaul submit FILE --watch` with a file of some usual format, and nothing else."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from longhaul.main import main
from tests.support.local import Local
from tests.training.hub_server import running_hub
from worker.training.tasks.seq2seq import builtin

pytestmark = pytest.mark.timeout(1800)  # jobs one after the other
ROWS = 48
PRETRAINED_STEPS = 60
Row = dict[str, Any]


def asked(number: int) -> str:
    """What a customer writes."""
    return f"My order {number} has not arrived. Where is it?"


def answered(number: int) -> str:
    """What support answers."""
    return f"Order {number} left our store on day {number % 28 + 1}."


def lines(make: Callable[[int], Row]) -> bytes:
    """One JSON object a line."""
    return b"".join(json.dumps(make(number), ensure_ascii=False).encode() + b"\n" for number in range(ROWS))


def array(make: Callable[[int], Row]) -> bytes:
    """A JSON array, as an editor indents it."""
    return json.dumps([make(number) for number in range(ROWS)], indent=2).encode()


def table(make: Callable[[int], Row], separator: str) -> bytes:
    """With a header."""
    rows = [make(number) for number in range(ROWS)]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(make: Callable[[int], Row]) -> bytes:
    """As pandas writes it."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([make(number) for number in range(ROWS)]), file)
    return file.getvalue()


def chat(number: int) -> Row:
    turns = [("system", "You are kind."), ("user", asked(number)), ("assistant", answered(number))]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def sharegpt(number: int) -> Row:
    turns = [("human", asked(number)), ("gpt", answered(number))]
    return {"id": number, "conversations": [{"from": name, "value": value} for name, value in turns]}


def alpaca(number: int) -> Row:
    return {
        "instruction": "Answer the customer.",
        "input": asked(number) if number % 2 else "",
        "output": answered(number),
    }


def dolly(number: int) -> Row:
    return {"instruction": asked(number), "context": "", "response": answered(number), "category": "open_qa"}


def squad(number: int) -> Row:
    answer = {"text": [f"day {number % 28 + 1}"], "answer_start": [0]}
    return {"question": asked(number), "context": answered(number), "answers": answer}


def recipe(number: int) -> Row:
    return {"title": f"Soup {number}", "ingredients": f"{number} leeks", "instructions": f"Boil {number} leeks."}


def columns(input: str, target: str) -> Callable[[int], Row]:
    """Rows of two columns, and one that is not learned from."""
    return lambda number: {"id": number, input: asked(number), target: answered(number)}


FILES: dict[str, tuple[str, bytes]] = {
    "openai.jsonl": ("OpenAI chat", lines(chat)),
    "sharegpt.json": ("ShareGPT chat", array(sharegpt)),
    "alpaca.json": ("Alpaca", array(alpaca)),
    "dolly.jsonl.gz": ("Dolly", gzip.compress(lines(dolly))),
    "squad.parquet": ("SQuAD", parquet(squad)),
    "cookbook.csv": ("recipes", table(recipe, ",")),
    "prompts.ndjson": ("prompt and completion", lines(columns("prompt", "completion"))),
    "support.csv": ("prompt and response", table(columns("Prompt", "Response"), ";")),
    "faq.tsv": ("question and answer", table(columns("question", "answer"), "\t")),
    "t5.jsonl.zst": (
        "inputs and targets",
        pa.compress(lines(columns("inputs", "targets")), codec="zstd", asbytes=True),
    ),
    "news.parquet": ("document and summary", parquet(columns("document", "summary"))),
    "labels.csv": ("text and label", b"\xef\xbb\xbf" + table(columns("TEXT", "LABEL"), ",")),
}
"""By name: what a file is recognized as, and its content."""
TRAINED = ("openai.jsonl", "alpaca.json", "squad.parquet", "labels.csv", "t5.jsonl.zst")
"""Those that become models, of each kind of file and task; the others are planned."""

RUN_ALL = """
import contextlib, io, json, os, sys
written = {}
for folder, snippet in json.load(sys.stdin):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(snippet, {})
    written[folder] = out.getvalue().rstrip("\\n")
print(json.dumps(written))
"""


def fenced(page: str, kind: str) -> str:
    """The first block of this kind."""
    return str(re.findall(rf"^```{kind}\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)[0])


def run_snippets(pages: dict[Path, str]) -> dict[str, str]:
    """What each snippet prints, in one process: importing transformers takes longer than the rest."""
    given = json.dumps([(str(folder), fenced(page, "python")) for folder, page in pages.items()])
    done = subprocess.run([sys.executable, "-c", RUN_ALL], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def submit(local: Local, files: Sequence[Path]) -> dict[str, subprocess.Popen[str]]:
    """All at once, as a person would: the file, and nothing else."""
    return {
        file.name: subprocess.Popen(
            [sys.executable, "-m", "longhaul.main", "submit", file.name, "--watch"],
            cwd=file.parent, env=local.environment | {"COLUMNS": "100"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for file in files
    }  # fmt: skip


def pretrain(folder: Path) -> None:
    """A model that knows what it says: of random weights every word is a close call, which rounding may tip."""
    builtin.build(folder, [text for number in range(ROWS) for text in (asked(number), answered(number))], seed=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
    batch = tokenizer([asked(1), answered(1), "Answer the customer."], return_tensors="pt", padding=True)
    labels = tokenizer([answered(1)] * 3, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(PRETRAINED_STEPS):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.to(torch.bfloat16).save_pretrained(folder)


def test_a_file_of_every_usual_format_becomes_a_model_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, home, here = tmp_path / "model", tmp_path / "home", tmp_path / "here"
    for folder in (model, home / "data", here):
        folder.mkdir(parents=True)
    pretrain(model)
    for name, (_, content) in FILES.items():
        (here / name).write_bytes(content)
    with running_hub(monkeypatch) as hub:
        hub.repositories["models/google/flan-t5-xl"] = model  # what a job trains that names no model
        with Local(home, environment={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}) as local:
            running = submit(local, [here / name for name in TRAINED])
            told = {name: process.communicate(timeout=1500)[0] for name, process in running.items()}
            monkeypatch.setenv("LONGHAUL_URL", local.url)
            for name in FILES.keys() - told.keys():
                assert main(["plan", str(here / name)]) == 0
                told[name] = capsys.readouterr().out
            jobs = {job["name"]: job for job in local.api.all() if not job["dry_run"]}
    problems = {name: told[name] for name, process in running.items() if process.returncode}
    assert problems == {}
    for name, (format, _) in FILES.items():
        assert f"read as {format}: " in told[name] and re.search(r"row [12] +input", told[name]), told[name]
    pages: dict[Path, str] = {}
    for name in TRAINED:
        job = jobs[name.partition(".")[0]]
        assert job["status"] == "succeeded" and job["plan"]["rows_looked_at"] == ROWS, job
        folder = home / "runs" / job["id"] / "model"
        pages[folder] = (folder / "README.md").read_text()
        assert f"dataset:{name}" in pages[folder]
    written = run_snippets(pages)
    shown = {folder: fenced(page, "text").strip() for folder, page in pages.items() if "The job's answer after" in page}
    for folder, text in shown.items():
        assert written[str(folder)] == text, pages[folder]
    assert len(shown) >= 2
