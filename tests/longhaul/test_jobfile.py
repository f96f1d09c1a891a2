"""What `longhaul submit` makes of its arguments."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from longhaul.jobfile import BadInput, apply_changes, read_job


def nobody(file: str) -> str:
    raise AssertionError(f"{file} is no file of rows")


def test_a_job_file_with_changes(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"data": {"train": "a.jsonl"}, "training": {"epochs": 5}}))
    changes = [
        "training.epochs=3",
        "training.learning_rate=1e-3",
        "name=chef",
        "memory.budget=auto",
        "resume_from=null",
    ]
    assert read_job(str(file), changes, rows=nobody) == {
        "name": "chef",
        "data": {"train": "a.jsonl"},
        "training": {"epochs": 3, "learning_rate": 1e-3},
        "memory": {"budget": "auto"},
        "resume_from": None,
    }


def test_a_job_may_come_through_a_pipe_and_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = json.dumps({"name": "n" * 70_000})  # more than is read at first
    file = tmp_path / "job.json"
    file.write_text(text, encoding="utf-8-sig")
    with subprocess.Popen(["cat", file], stdout=subprocess.PIPE) as cat:
        assert cat.stdout is not None
        for name in (str(file), f"/dev/fd/{cat.stdout.fileno()}"):
            assert read_job(name, [], rows=str) == json.loads(text)


@pytest.mark.parametrize(
    ("name", "text", "called"),
    [
        ("my recipes.v2.jsonl", None, "my recipes"), ("ROWS.CSV", None, "ROWS"), ("rows.Parquet", None, "rows"),
        ("rows.json", '{"input": "a", "target": "b"}\n{"input": "c", "target": "d"}\n', "rows"),
        ("rows.json", '[{"input": "a"}]', "rows"), ("rows.json", '\ufeff\n [\n  {"input": "a"}\n]', "rows"),
    ],
)  # fmt: skip
def test_a_file_of_rows_is_a_job(tmp_path: Path, name: str, text: str | None, called: str) -> None:
    """By its ending in any case, or as lines or an array of JSON."""
    file = tmp_path / name
    if text:
        file.write_text(text)
    job = read_job(str(file), ["training.epochs=1"], rows=lambda file: f"there/{Path(file).name}")
    assert job == {"name": called, "data": {"train": f"there/{name}"}, "training": {"epochs": 1}}


@pytest.mark.parametrize("content", [b"PK\x03\x04\xff", b"question,answer\na,b\n"])
def test_a_file_that_is_no_job_may_hold_rows_under_another_name(tmp_path: Path, content: bytes) -> None:
    for name, hinted in [("rows.bin", True), ("job.json", False)]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput) as refused:
            read_job(str(tmp_path / name), [], rows=nobody)
        assert ("it ends in .jsonl, .json, .csv" in str(refused.value.hint)) is hinted
        assert not hinted or all(suffix in str(refused.value.hint) for suffix in (".xlsx", ".ods", ".zip"))


@pytest.mark.parametrize(
    ("content", "changes", "part"),
    [
        (None, [], "No such file"),
        (b'{"name": ', [], "line 1, column 10"),
        (b'{"a": [1,\n2 ,\n ],}', [], "an extra comma before ] at line 2, column 3"),
        (b'{"data": {},\n}', [], "an extra comma before } at line 1, column 12"),
        (b'{"a": 1,, "b": 2}', [], "enclosed in double quotes at line 1, column 9"),
        (b"\xff", [], "not UTF-8"),
        (b"{}\n}", [], "line 2, column 1"),
        (b'{"name":\n"x"}\n{}', [], "line 3, column 1"),
        (b"{} {}", [], "line 1, column 4"),
        (b"7", [], "a job is a JSON object"),
        (b'{"data": [{"paragraphs": []}]}', [], "is no job: it holds questions about paragraphs"),
        (b'{"model": "a", "data": [{"train": "b"}]}', [], "`data` must be an object; the minimum is"),
        (b'{"data": ["rows.jsonl"]}', [], "`data` must be an object; the minimum is"),
        (b"{}", ["epochs"], "write key.dotted=value"),
        (b"{}", ["a..b=1"], "write key.dotted=value"),
        (b'{"name": "x"}', ["name.first=1"], "has no keys"),
        (b'{"data": {"train": ["a.jsonl"]}}', ["data.train.1.weight=2"], "the places 0 to 0, and no 1"),
        (b'{"data": {"train": "a.jsonl"}}', ["data.train.0.weight=2"], "is 'a.jsonl' and has no keys"),
    ],
)
def test_bad_input_says_how_it_would_be_right(
    tmp_path: Path, content: bytes | None, changes: list[str], part: str
) -> None:
    file = tmp_path / "job.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=part):
        read_job(str(file), changes, rows=nobody)


@pytest.mark.skipif(shutil.which("jq") is None, reason="there is no jq here")
def test_the_hint_for_squad_makes_a_file_of_rows(tmp_path: Path) -> None:
    content = [{"title": "T", "paragraphs": [{"context": "it's C", "qas": [
        {"id": "1", "question": "Q?", "answers": [{"text": "A", "answer_start": 3}, {"text": "B"}]},
        {"id": "2", "question": "none?", "answers": [], "is_impossible": True},
    ]}]}]  # fmt: skip
    rows = [{"question": "Q?", "context": "it's C", "answers": {"text": ["A", "B"]}}]
    file = tmp_path / "train v1.1.json"
    file.write_text(json.dumps({"version": "1.1", "data": content}))
    with pytest.raises(BadInput) as caught:
        read_job(str(file), [], rows=nobody)
    command = str(caught.value.hint).partition("make a file of rows of it: ")[2]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == rows


@pytest.mark.parametrize(
    "written",
    [
        {"text": {"0": "a", "7": "it's b"}, "label": {"0": 1, "7": None}},
        {"0": {"text": "a", "label": 1}, "7": {"text": "it's b", "label": None}},
        {"columns": ["text", "label"], "index": [0, 7], "data": [["a", 1], ["it's b", None]]},
    ],
    ids=["columns", "index", "split"],
)
def test_the_hint_for_what_pandas_writes_makes_a_file_of_rows(tmp_path: Path, written: object) -> None:
    file = tmp_path / "my rows.json"
    file.write_text(json.dumps(written))
    with pytest.raises(BadInput, match="as pandas writes them unless told otherwise") as caught:
        read_job(str(file), [], rows=nobody)
    subprocess.run(["sh", "-c", str(caught.value.hint).partition("of it: ")[2]], cwd=tmp_path, check=True)
    made = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert made == [{"text": "a", "label": 1}, {"text": "it's b", "label": None}]


@pytest.mark.parametrize(
    ("inside", "ending"), [("rows.csv", ".zip"), ("[Content_Types].xml", ".xlsx"), ("mimetype", ".ods")]
)
def test_the_hint_for_a_workbook_or_an_archive_under_another_name_makes_it_rows(
    tmp_path: Path, inside: str, ending: str
) -> None:
    file = tmp_path / "my rows.dat"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr(inside, "ä,b\n" * 99)
    with pytest.raises(BadInput, match="its name does not say so") as caught:
        read_job(str(file), [], rows=nobody)
    subprocess.run(["sh", "-c", str(caught.value.hint).partition("again: ")[2]], cwd=tmp_path, check=True)
    renamed = str(file.with_suffix(ending))
    assert read_job(renamed, [], rows=str) == {"name": "my rows", "data": {"train": renamed}}


def test_the_type_of_a_part_may_stand_for_it_and_be_added_to() -> None:
    assert apply_changes({"task": "causal"}, ["method=lora", "method.rank=4", "task.loss_on=all"]) == {
        "task": {"type": "causal", "loss_on": "all"}, "method": {"type": "lora", "rank": 4},
    }  # fmt: skip


def test_the_weight_of_one_of_several_sources_is_set_by_its_place() -> None:
    job = {"data": {"train": ["a.jsonl", {"source": "b.jsonl", "weight": 3}]}}
    assert apply_changes(job, ["data.train.0.weight=2", "data.train.1.weight=0.5"]) == {
        "data": {"train": [{"source": "a.jsonl", "weight": 2}, {"source": "b.jsonl", "weight": 0.5}]}
    }


def test_a_number_is_text_where_the_key_takes_text() -> None:
    changes = ["name=2024", "metadata.year=1999", "resources.gpu_name=4090", "training.epochs=3", "data.validation=0.1"]
    assert apply_changes({}, changes) == {
        "name": "2024",
        "metadata": {"year": "1999"},
        "resources": {"gpu_name": "4090"},
        "training": {"epochs": 3},
        "data": {"validation": 0.1},
    }
