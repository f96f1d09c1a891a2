"""`longhaul predict` on the client's side: what is wrong is known first, nobody writes into another's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from jobs.generation import GenerateBody, Sampling
from longhaul.commands.trying import OPTIONS, SAMPLING
from longhaul.jobfile import BadInput
from longhaul.predicting import PredictionTask, predict


class AnsweringApi:
    """Answers each row with its number; `lacking`: the first answers lack their last row."""

    def __init__(self, lacking: int = 0) -> None:
        self.lacking, self.asked, self.bodies = lacking, 0, list[Mapping[str, Any]]()

    def generate(self, _job: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.asked += 1
        self.bodies.append(body)
        rows = body["rows"][:-1] if self.asked <= self.lacking else body["rows"]
        common = {"model": "trained", "labels": None, "finish_reason": "stop", "error": None}
        return {"outputs": [{"index": at, "text": f"of {row['n']}", **common} for at, row in enumerate(rows)]}


def predicted(api: AnsweringApi, rows: Path, out: Path, **options: Any) -> int:
    wanted = PredictionTask("job-1", rows, out, options)
    return predict(cast("Any", api), wanted, on_answer=lambda *_: None, on_trouble=lambda _: None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(40)))
    return file


def test_an_answer_that_lacks_rows_is_asked_for_again(rows: Path, tmp_path: Path) -> None:
    api, out = AnsweringApi(lacking=1), tmp_path / "out.jsonl"
    assert predicted(api, rows, out) == 40
    assert [json.loads(line)["text"] for line in out.read_text().splitlines()] == [f"of {n}" for n in range(40)]
    assert api.asked == 4 and not list(tmp_path.glob("*.state"))


def test_a_line_that_is_wrong_is_named_before_anything_is_written(rows: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + '{"n": 4')
    api = AnsweringApi()
    with pytest.raises(BadInput, match="line 41: it is not JSON"):
        predicted(api, rows, tmp_path / "out.jsonl")
    assert api.asked == 0 and [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_options_of_the_command_are_all_that_the_route_has() -> None:
    inputs = {"input", "row", "rows", "messages", "stream"}
    assert {*OPTIONS, "base"} == GenerateBody.model_fields.keys() - inputs
    assert {*SAMPLING, "temperature"} == Sampling.model_fields.keys()


def test_two_do_not_write_one_file(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    class Another(AnsweringApi):
        """While it is asked, somebody begins the same."""

        def generate(self, job: str, body: Mapping[str, Any]) -> dict[str, Any]:
            with pytest.raises(BadInput, match="another `longhaul predict` is writing"):
                predicted(AnsweringApi(), rows, out)
            return super().generate(job, body)

    assert predicted(Another(), rows, out) == 40
    assert len(out.read_text().splitlines()) == 40


def test_a_file_that_is_there_is_left_as_it_is(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine\n")
    with pytest.raises(BadInput, match="is there already"):
        predicted(AnsweringApi(), rows, out)
    assert out.read_text() == "mine\n" and not list(tmp_path.glob("*.state"))


def test_the_last_checkpoint_stays_the_one_that_it_was_at_first(rows: Path, tmp_path: Path) -> None:
    class Trains(AnsweringApi):
        """There is another checkpoint each time that somebody looks."""

        def checkpoints(self, job: str) -> list[Any]:
            return [{"id": f"{job}/step-{len(self.bodies) + 1:08d}", "best": False}]

    api = Trains()
    assert predicted(api, rows, tmp_path / "out.jsonl", checkpoint="last") == 40
    assert {body["checkpoint"] for body in api.bodies} == {"step-00000001"}
    with pytest.raises(BadInput, match="has no best checkpoint"):
        predicted(api, rows, tmp_path / "other.jsonl", checkpoint="best")


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV", "rows.parquet", "rows.jsonl.gz"])
def test_another_format_is_named_before_anything_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"n\n1\n")
    with pytest.raises(BadInput, match=f"{name} is no file of JSON lines, which `predict` reads alone"):
        predicted(AnsweringApi(), tmp_path / name, tmp_path / "out.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_numbers_that_json_does_not_have_are_missing_values_as_in_training(tmp_path: Path) -> None:
    rows, api = tmp_path / "rows.jsonl", AnsweringApi()
    rows.write_text('{"n": 0, "note": NaN}\n{"n": 1, "note": [Infinity, -Infinity, 1e999, 0.5]}\n')
    assert predicted(api, rows, tmp_path / "out.jsonl") == 2
    assert api.bodies == [{"rows": [{"n": 0, "note": None}, {"n": 1, "note": [None, None, None, 0.5]}]}]


@pytest.mark.parametrize("broken", [[2], [0, 1, 39], range(40)])
def test_a_row_of_broken_unicode_gets_a_line_with_its_error(rows: Path, tmp_path: Path, broken: list[int]) -> None:
    api, out, lines = AnsweringApi(), tmp_path / "out.jsonl", rows.read_text().splitlines()
    for number in broken:
        lines[number] = '{"n": "half of it: \\ud800"}'
    rows.write_text("\n".join(lines) + "\n")
    assert predicted(api, rows, out) == 40
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in written] == list(range(40))
    for number, line in enumerate(written):
        assert ("surrogate" in line["error"]) if number in broken else line["text"] == f"of {number}"
    assert sum(len(body["rows"]) for body in api.bodies) == 40 - len(broken)
