"""`longhaul predict` on the client's side: what is wrong is known first, nobody writes into another's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from jobs.generation import GenerateBody, Sampling
from longhaul.commands.trying import OPTIONS, SAMPLING
from longhaul.connection import ApiError
from longhaul.jobfile import BadInput
from longhaul.main import main
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
    return predict(cast("Any", api), wanted, on_answer=lambda *_: None, on_trouble=lambda _: None).rows


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
    inputs = {"input", "row", "rows", "messages", "tools", "stream"}
    assert {*OPTIONS, "base", "stop"} == GenerateBody.model_fields.keys() - inputs
    assert {*SAMPLING, "temperature"} == Sampling.model_fields.keys()


class FailingApi(AnsweringApi):
    """As `AnsweringApi`, but a request with one of these rows ends as `codes` says."""

    def __init__(self, codes: Mapping[int, str]) -> None:
        super().__init__()
        self.codes = codes

    def generate(self, job: str, body: Mapping[str, Any]) -> dict[str, Any]:
        for row in body["rows"]:
            if (code := self.codes.get(row["n"])) is not None:
                self.asked += 1
                raise ApiError(f"row {row['n']}", status=422 if code == "input_too_long" else 503, code=code)
        return super().generate(job, body)


def test_a_row_that_the_model_cannot_answer_gets_its_line_and_the_others_theirs(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longhaul.connection.time.sleep", lambda _: None)
    out = tmp_path / "out.jsonl"
    api = FailingApi({3: "input_too_long", 20: "model_process_ended", 39: "out_of_memory"})
    assert predicted(api, rows, out) == 40
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(40))
    assert {line["row"]: line["error"] for line in lines if "error" in line} == {n: f"row {n}" for n in (3, 20, 39)}
    assert all(line["text"] == f"of {line['row']}" for line in lines if "error" not in line)


def test_an_outage_is_waited_for_and_is_no_rows_fault(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, out = FailingApi({0: "no_worker"}), tmp_path / "out.jsonl"
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 9:
            api.codes = {}

    monkeypatch.setattr("longhaul.connection.time.sleep", sleep)
    assert predicted(api, rows, out) == 40
    assert len(pauses) == 9 and '"error"' not in out.read_text()


def test_rows_that_cannot_be_sent_get_their_lines(tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    deep = '{"n": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
    large = json.dumps({"n": 2, "x": "x" * 1_100_000})
    cyrillic = [json.dumps({"n": n, "x": "\u0451" * 14_000}, ensure_ascii=False) for n in range(3, 20)]
    file.write_text("\n".join(['{"n": 0}', deep, large, *cyrillic]) + "\n")
    api = AnsweringApi()
    assert predicted(api, file, out) == 20
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in lines if "error" in line] == [1, 2]
    assert all(len(json.dumps(body["rows"])) < 600_000 for body in api.bodies)


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
    with pytest.raises(BadInput, match=f"{name} is no file of JSON lines, and `predict` reads no other"):
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


class HalfMissingApi(AnsweringApi):
    """As the service answers rows, of which those in `missing` lack their column."""

    def __init__(self, missing: range) -> None:
        super().__init__()
        self.missing = missing

    def __enter__(self) -> HalfMissingApi:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, job: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = super().generate(job, body)
        for output in answer["outputs"]:
            if body["rows"][output["index"]]["n"] in self.missing:
                output |= {"text": "", "error": "missing body"}
        return {**answer, "device": "cpu", "why": None, "tokens_per_s": None, "seed": None}


@pytest.mark.parametrize(
    ("missing", "said", "code"),
    [
        (range(0), "40 rows answered, in out.jsonl\n", 0),
        (range(31, 32), "39 of 40 rows answered; 1 has an error (missing body: 1), in out.jsonl\n", 0),
        (range(9), "31 of 40 rows answered; 9 have an error (missing body: 9), in out.jsonl\n", 0),
        (range(40), "0 of 40 rows answered; 40 have an error (missing body: 40), in out.jsonl\n", 2),
    ],
)
def test_rows_without_an_answer_are_counted_by_reason(
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: range,
    said: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("longhaul.commands.command.Call.connect", lambda _: HalfMissingApi(missing))
    assert main(["predict", "job-1", rows.name, "--out", "out.jsonl"]) == code
    out, errors = capsys.readouterr()
    assert out == said
    assert ("after correcting the rows, remove out.jsonl, or give another file with --out" in errors) == (code != 0)
    assert main(["predict", "job-1", rows.name, "--out", "again.jsonl", "--json"]) == code
    errors_by_reason = {"missing body": len(missing)} if missing else {}
    counts = {"rows": 40, "answered": 40 - len(missing), "errors": len(missing), "reasons": errors_by_reason}
    assert json.loads(capsys.readouterr().out) == counts | {"out": "again.jsonl"}
