"""Stage *check*: each thing that is wrong gets its own clear error, and what is right a plan."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.attempt import Finished
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, StageError
from jobs.preview import SourcePreview
from tests.support.workbooks import cells_of, xlsx, zipped
from tests.training.workplace import EXAMPLES, Workplace, pairs
from tests.training.workplace import of_rows as of_rows
from worker.training.dataset.data import PreparedDataset
from worker.training.models import model_files
from worker.training.rows import origin
from worker.training.rows.windows_1252 import WINDOWS_1252
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.layout import layout_of, t5_shapes


def refusal(workplace: Workplace, train: Any = "rows.jsonl", **parts: Any) -> StageError:
    with pytest.raises(StageError) as caught:
        workplace.check(workplace.job(train, **parts))
    return caught.value


def test_a_good_job_gets_a_provisional_plan(tmp_path: Path) -> None:
    workplace = Workplace(tmp_path)
    workplace.rows("rows.jsonl", pairs(1000))
    run = workplace.job(data={"validation": 0.1}, training={"epochs": 2, "batch_size": 50})
    result = workplace.check(run)["plan"]
    assert result["rows_looked_at"] == result["rows_estimated"] == 1000
    assert (result["steps"], result["parameters"], result["model"]) == (37, 1_410_816, "builtin:t5-tiny")
    assert result["resolved"] == {
        "micro_batch": 8, "activation_checkpointing": 0, "optimizer": "adamw", "compile": False, "gpus": 1,
        "dtype": "bfloat16",
    }  # fmt: skip
    assert result["invalid_rows"] == {}
    plan = run.plan()
    assert (plan.data.input, plan.data.target, plan.data.complete) == ("{input}", "{target}", False)
    assert plan.data.rows == 908


def table(rows: list[dict[str, Any]], **dialect: Any) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, **dialect)
    writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
    return file.getvalue().encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file.getvalue()


@pytest.mark.parametrize("count", [40, 30_000])
def test_every_format_is_looked_at_in_the_same_way(workplace: Workplace, count: int) -> None:
    draw = random.Random(0)
    rows = [{"input": draw.randbytes(40).hex(), "target": f"{n}"} for n in range(count - 1)]
    rows.append({"input": "", "target": "nothing"})
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    zstd = pa.Codec("zstd")
    contents = {
        "rows.jsonl.zst": bytes(zstd.compress(lines)),
        "rows.ndjson": lines,
        "utf16.json": lines.decode().encode("utf-16"),
        "rows.csv": table(rows),
        "rows.csv.gz": gzip.compress(table(rows, delimiter=";")),
        "rows.tsv": table(rows, delimiter="\t"),
        "rows.parquet": parquet(rows),
    }
    for name, content in contents.items():
        (workplace.data / name).write_bytes(content)
        result = workplace.check(workplace.job(name, data={"max_invalid_fraction": 0.1}))["plan"]
        assert (result["rows_looked_at"], result["all_rows"]) == (min(count, 10_000), count == 40), name
        assert result["rows_estimated"] == pytest.approx(count, rel=0.1), name
        assert result["invalid_rows"] == ({"empty input": 1} if count == 40 else {}), name


def test_what_of_a_file_is_read_and_how_is_said(workplace: Workplace) -> None:
    """In the event, in the plan and in the preview."""
    cells = cells_of([["input", "target"], *(list(row.values()) for row in pairs(99))])
    table_of_umlauts = table([{**row, "input": f"größer {row['input']}"} for row in pairs(99)]).decode()
    files = {
        "rows.xlsx": (xlsx({"Rows": cells, "Notes": ""}), "sheet 'Rows'; not read: sheet 'Notes'"),
        "rows.zip": (zipped({"rows.csv": table(pairs(99))}), "file 'rows.csv' of the archive"),
        "rows.csv": (table_of_umlauts.encode("cp1252"), WINDOWS_1252),
        "rows.jsonl": (b"".join(json.dumps(row).encode() + b"\n" for row in pairs(99)), None),
    }
    for name, (content, reading) in files.items():
        (workplace.data / name).write_bytes(content)
        run = workplace.job([name], data={"validation": 0.1})
        checked = workplace.check(run)["plan"]
        assert (checked["rows_looked_at"], checked["invalid_rows"]) == (99, {})
        assert checked.get("reading") == reading
        [planned], [shown] = run.plan().data.sources, run.preview().sources
        assert planned.reading == shown.reading == reading
        assert shown.duplicates == 0
    workplace.rows("rows.jsonl", [*pairs(99), *pairs(9)])
    run = workplace.job(data={"validation": 0.1})
    workplace.check(run)
    assert run.preview().sources[0].left_out_texts == ("left out: equal to an earlier row: 9 of all rows",)


@pytest.mark.parametrize(("model", "equal"), [("builtin:t5-tiny", 3), ("builtin:qwen-tiny", 1)])
def test_typography_makes_no_other_row_where_the_tokenizer_does_not_know_it(
    workplace: Workplace, model: str, equal: int
) -> None:
    texts = ["“a”", '"a"', "½", "1/2", "e\u0301", "é"]
    workplace.rows("rows.jsonl", [{"input": text, "target": "b"} for text in texts])
    assert workplace.check(workplace.job(model=model))["plan"]["duplicates"] == equal


def test_a_format_can_be_said_where_the_name_does_not(workplace: Workplace) -> None:
    (workplace.data / "rows.txt").write_bytes(table(pairs(5)))
    run = workplace.job("rows.txt", data={"format": "csv"})
    assert workplace.check(run)["plan"]["rows_looked_at"] == 5
    error = refusal(workplace, "rows.txt", data={"format": "jsonl"})
    assert error.detail_code == "no_usable_columns"
    assert "bad JSON: 6" in str(error) and "data.format" in str(error.hint)
    assert refusal(workplace, "rows.txt", data={"format": "parquet"}).detail_code == "not_parquet"
    (workplace.data / "rows.jsonl").write_bytes(b'{"input": "a", "target": "b"}\r{"input": "c", "target": "d"}\r')
    command = str(refusal(workplace).hint).removeprefix("end lines in LF: ")
    subprocess.run(["bash", "-c", command], cwd=workplace.data, check=True)
    assert workplace.check(workplace.job("lf-rows.jsonl"))["plan"]["rows_looked_at"] == 2


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("../outside.jsonl", None, "path_outside_data"),
        ("missing.jsonl", None, "file_missing"),  # others that are no files of rows: rows/test_sources.py
        ("rows.jsonl", b"\n  \n", "no_rows"),
        ("rows.csv", b"input,target\n", "no_rows"),
        ("rows.jsonl", b"just text\n[1, 2]\n", "no_usable_columns"),
        ("rows.jsonl", b'{"ask": "a", "tell": "b"}\n', "no_usable_columns"),
        ("rows.csv", b"asked,answered\n1,2\n", "no_usable_columns"),
        ("rows.csv", b"input,,target\n1,2,3\n", "bad_header"),  # other damage: rows/test_reading.py
        ("rows.csv", "input,target\nпривет,1\n".encode("cp1251"), "wrong_encoding"),
        ("rows.csv", "input,target\na,1\nпривет,1\n".encode("cp1251"), "too_many_invalid_rows"),
        ("rows.parquet", b"PAR1 and so on", "damaged_file"),
        ("rows.parquet", parquet([{"input": {"a": 1}, "target": "x"}]), "too_many_invalid_rows"),
    ],
)
def test_a_bad_file_is_refused_by_name(workplace: Workplace, name: str, content: bytes | None, code: str) -> None:
    if content is not None:
        (workplace.data / name).write_bytes(content)
    error = refusal(workplace, name)
    assert error.detail_code == code and error.hint
    assert (error.param or "").startswith("data.")


def test_rows_whose_columns_hold_something_else_throughout_ask_what_to_learn_from(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"question": "q", "context": "c", "answers": [{"text": "a"}]}] * 3)
    error = refusal(workplace)
    assert "Commonest: missing answers.text[0]: 3" in str(error)
    assert error.hint == "repair these lines, or say in data.input and data.target what else to learn from"
    run = workplace.job(data={"input": "question", "target": "{answers[0].text}", "validation": 0.0})
    assert workplace.check(run)["plan"]["invalid_rows"] == {}


def test_columns_that_no_template_names_may_hold_anything(workplace: Workplace) -> None:
    days = pa.array([10**9] * 50, pa.int32()).view(pa.date32())  # in the year 2,739,877
    long = pa.array([2**62] * 50, pa.int64()).view(pa.duration("s"))
    score = [float("nan")] * 50
    names = {"input": [f"q {n}" for n in range(50)], "target": ["a"] * 49 + [None], "day": days, "long": long}
    pq.write_table(pa.table({**names, "score": score}), workplace.data / "rows.parquet")
    result = workplace.check(workplace.job("rows.parquet", data={"max_invalid_fraction": 0.1}))["plan"]
    assert result["invalid_rows"] == {"missing target": 1}
    for column in ("day", "score"):
        error = refusal(workplace, "rows.parquet", data={"input": column, "target": "target"})
        assert error.detail_code == "too_many_invalid_rows"


def test_a_column_name_that_is_no_unicode_is_written_differently(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", ['{"\\ud83d": 1, "input": "a"}'] * 3)
    error = refusal(workplace)
    assert error.detail_code == "no_usable_columns"
    assert str(error).endswith("rows.jsonl; it has: input, \\ud83d")
    workplace.rows("rows.jsonl", ['{"\\ud83d": 1, "input": "a", "target": "b"}', *pairs(3)])
    assert workplace.check(workplace.job())["plan"]["rows_looked_at"] == 4


def test_rows_for_another_task_are_sent_there(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"text": f"plain text {n}"} for n in range(5)])
    for model in ("builtin:t5-tiny", "builtin:roberta-tiny"):
        error = refusal(workplace, model=model)
        assert error.detail_code == "no_usable_columns"
        assert "are for the task causal: take a model for it, such as builtin:qwen-tiny" in str(error.hint)
    workplace.check(workplace.job(model="builtin:qwen-tiny"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"Prompt": "how is {}?", "chosen": "good {}", "rejected": "bad"}, "preferences, as DPO learns them"),
        ({"chosen": [{"role": "user", "content": "how is {}?"}, {"role": "assistant", "content": "good"}],
          "rejected": []}, "preferences, as DPO learns them"),
        ({"tokens": ["a", "b"], "ner_tags": [0, 1]}, "a label for each word"),
    ],
)  # fmt: skip
def test_rows_that_nothing_here_learns_from_are_called_what_they_are(
    workplace: Workplace, row: dict[str, Any], said: str
) -> None:
    workplace.rows("rows.jsonl", [json.dumps(row).replace("{}", f"it {n}") for n in range(20)])
    error = refusal(workplace, model="builtin:qwen-tiny")
    assert error.detail_code == "no_usable_columns" and f"these are rows of {said}" in str(error.hint)
    settings = re.findall(r"--set data\.(\w+)=(\S+)", str(error.hint))
    assert bool(settings) == ("chosen" in row), "what can be learned of them"
    if settings:
        workplace.check(workplace.job(model="builtin:qwen-tiny", data=dict(settings)))


def test_a_table_gets_the_hint_for_tables(workplace: Workplace) -> None:
    (workplace.data / "rows.csv").write_text('input,target\n"a"b,c\n')
    error = refusal(workplace, "rows.csv")
    assert error.detail_code == "no_usable_columns"
    assert "header line" in str(error.hint) and "JSON" not in str(error.hint)


def test_a_config_that_is_made_to_hurt_is_refused(workplace: Workplace, model_folder: Path) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    model = workplace.data / "model"
    shutil.copytree(model_folder, model)
    config = json.loads((model / "config.json").read_text())
    for content, code in (
        ("[" * 200_000 + "]" * 200_000, "no_config"),
        (json.dumps(config)[:-1] + ', "x": ' + '{"a":' * 200_000 + "1" + "}" * 200_000 + "}", "no_config"),
        (json.dumps(config | {"num_layers": 100_000}), "bad_config"),
        (json.dumps(config | {"num_decoder_layers": 10**12}), "bad_config"),
    ):
        (model / "config.json").write_text(content)
        assert refusal(workplace, model="./model").detail_code == code


@pytest.mark.parametrize("kind", ["rows", "config"])
def test_a_file_that_takes_all_memory_is_refused(workplace: Workplace, model_folder: Path, kind: str) -> None:
    rows, model = "rows.jsonl", "./model"
    workplace.rows(rows, pairs(20))
    shutil.copytree(model_folder, workplace.data / "model")
    if kind == "rows":
        rows, model = "rows.parquet", "builtin:t5-tiny"
        table = pa.table({"input": ["x" * (1 << 20)] * 900, "target": ["y"] * 900})
        pq.write_table(table, workplace.data / rows, compression="zstd", use_dictionary=False, data_page_size=1 << 30)
    else:
        (workplace.data / "model" / "config.json").write_text("[" + "[]," * 15_000_000 + "1]")
    run = workplace.job(rows, model=model)
    environment = {"LONGHAUL_PREPARE_MEMORY_GB": "1", "LONGHAUL_DEVICE": "cpu", "LONGHAUL_DATA": str(workplace.data)}
    command = [sys.executable, "-m", "worker.training", "check", str(run.path)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 77, done.stderr
    last = run.attempt_lines("check")[-1]
    assert isinstance(last, Finished) and last.error is not None
    assert (last.reason, last.error.code) == ("rejected", "memory_limit")
    assert "LONGHAUL_PREPARE_MEMORY_GB" in str(last.error.hint)


def test_recipes_are_recognized(workplace: Workplace) -> None:
    shutil.copy(EXAMPLES, workplace.data / "recipes.jsonl")
    result = workplace.check(workplace.job("recipes.jsonl"))["plan"]
    assert result["rows_looked_at"] >= 200
    assert result["input"] == "Write the directions. {title}: {ingredients}"


def test_the_validation_file_is_checked_as_well(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    error = refusal(workplace, data={"validation": "other.jsonl"})
    assert (error.detail_code, error.param) == ("file_missing", "data.validation")
    workplace.rows("other.jsonl", [{"input": "a", "target": ""}] * 5)
    assert refusal(workplace, data={"validation": "other.jsonl"}).detail_code == "too_many_invalid_rows"
    workplace.rows("other.jsonl", ["{}"] * 5)
    assert "recognized in other.jsonl; it has: none" in str(refusal(workplace, data={"validation": "other.jsonl"}))
    workplace.rows("other.jsonl", [{"ask": "a", "tell": "b"}] * 5)
    assert "recognized in other.jsonl; it has: ask, tell" in str(refusal(workplace, data={"validation": "other.jsonl"}))
    workplace.rows("other.jsonl", pairs(5, start=100))
    run = workplace.job(data={"validation": "other.jsonl"})
    workplace.check(run)
    assert (run.plan().data.rows, run.plan().data.validation_rows) == (20, 5)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("{messages[0].contnt}", "messages[0].content"),
        ("{messages[-1].contents}", "messages[-1].content"),
        ("{messages.promt}", "messages.prompt"),
        ("{mesages[0].content}", "messages[0].content"),
        ("{meta.langage}", "meta.language"),
    ],
)
def test_a_path_that_no_row_has_is_named_with_the_nearest(
    workplace: Workplace, format: str, written: str, meant: str
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": turns, "meta": {"language": "en"}}]
    workplace.rows("rows.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), workplace.data / "rows.parquet")
    error = refusal(workplace, f"rows.{format}", data={"input": written, "target": "{messages[-1].content}"})
    assert (error.detail_code, error.param) == ("unknown_column", "data.input")
    assert str(error.hint).startswith(f"did you mean {meant!r}?")
    assert "there are: messages, messages[0].content, messages[0].role, meta, meta.language" in str(error)
    right = {"input": "{messages[7].content?}{meta.language}{messages[0].content}", "target": "{messages.completion}"}
    workplace.check(workplace.job(f"rows.{format}", data={**right, "validation": 0}))


def test_all_that_is_wrong_is_said_at_once(with_model: Workplace) -> None:
    with_model.rows("rows.jsonl", [{"prompt": "a", "completion": "b"}])
    error = refusal(
        with_model,
        ["none.jsonl", "rows.jsonl"],
        model="./t6",
        data={"input": "{promt}", "target": "{completion}{answer}", "validation": "held_out.jsonl"},
    )
    said = str(error)
    assert said.startswith("5 errors:\n- data.train.0.source: there is no none.jsonl in the data directory\n  hint: ")
    assert (error.detail_code, error.param, error.hint) == ("file_missing", "data.train.0.source", None)
    for one in (
        "- data.validation: there is no held_out.jsonl",
        "- model: there is no folder ./t6",
        "- data.input: no row of rows.jsonl has a column 'promt'; there are: completion, prompt\n"
        "  hint: did you mean 'prompt'?",
        "- data.target: no row of rows.jsonl has a column 'answer'",
    ):
        assert f"\n{one}" in said


def test_what_is_wrong_with_every_source_is_said_once(workplace: Workplace) -> None:
    for name in ("rows.jsonl", "more.jsonl"):
        workplace.rows(name, pairs(3))
    error = refusal(workplace, ["rows.jsonl", "more.jsonl"], data={"input": "{input", "target": "target}"})
    assert str(error).startswith("2 errors:\n- data.input = '{input': ") and "\n- data.target = 'target}'" in str(error)
    assert error.detail_code == "bad_template"


def test_an_estimate_of_the_rows_refuses_nothing(workplace: Workplace) -> None:
    # The first rows are long, so there seem to be 11,000. Before: "1.4 %" of rows, of which 0.15 % are bad.
    long = [json.dumps({"input": f"{n} {'word ' * 100}", "target": "x"}) for n in range(10_000)]
    short = [json.dumps({"input": f"{n}", "target": "x"}) for n in range(10_000, 40_000)]
    workplace.rows("rows.jsonl", long[:9_850] + ["{"] * 150 + short)
    result = workplace.check(workplace.job(data={"max_invalid_fraction": 0.01}))["plan"]
    assert result["invalid_rows"] == {"bad JSON": 150} and result["rows_looked_at"] == 10_000


def test_too_many_bad_rows_are_refused_with_their_commonest_reasons(workplace: Workplace) -> None:
    bad = ["{", "{", '{"input": "x"}', '{"input": "", "target": "y"}', "[]", "{"]
    workplace.rows("rows.jsonl", pairs(94) + bad)
    error = refusal(workplace)
    assert (error.detail_code, error.reason) == ("too_many_invalid_rows", "bad_data")
    assert "6 of 100 rows of rows.jsonl cannot be used (6 %" in str(error)
    assert "bad JSON: 3 (lines 95, 96, 100)" in str(error)
    assert str(error.hint).endswith("or set data.max_invalid_fraction to 0.06 to continue without them")
    result = workplace.check(workplace.job(data={"max_invalid_fraction": 0.06}))["plan"]
    assert sum(result["invalid_rows"].values()) == 6
    # Of a file that is mostly something else nobody is led to learn the rest.
    workplace.rows("rows.jsonl", pairs(14) + bad)
    assert "max_invalid_fraction" not in str(refusal(workplace).hint)


def test_a_bad_start_of_a_long_file_is_not_held_against_the_rest(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", ['{"input": "no target at all"}'] * 150 + pairs(20_000))
    assert workplace.check(workplace.job())["plan"]["invalid_rows"] == {"missing target": 150}


def test_rows_that_a_file_expands_to_are_read_up_to_a_limit(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "READ_CHARACTERS", 64 << 20)  # a quarter of it for each of four readings
    text = pa.DictionaryArray.from_arrays([0] * 5000, ["x" * (4 << 20)])
    pq.write_table(pa.table({"input": text, "target": text}), workplace.data / "bomb.parquet", compression="zstd")
    assert (workplace.data / "bomb.parquet").stat().st_size < 1 << 20
    error = refusal(workplace, "bomb.parquet")
    assert error.detail_code == "no_rows"
    assert str(error).endswith(
        "(over-long row: 16); check reads no further than row 16: the rows so far are too large or take too long"
    )


@pytest.mark.parametrize(("limit", "value"), [("READ_CHARACTERS", 20_000), ("READ_S", 0.0)])
def test_where_rows_take_too_much_those_so_far_have_to_do(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, limit: str, value: float
) -> None:
    monkeypatch.setattr(origin, limit, value)
    for name, start in (("a.jsonl", 0), ("b.jsonl", 2000)):
        workplace.rows(name, pairs(2000, start))
    result = workplace.check(workplace.job([{"source": "a.jsonl"}, {"source": "b.jsonl"}]))["plan"]
    assert result["rows_looked_at"] == 1000, "a block of each source"
    assert 3500 < result["rows_estimated"] < 4500


# -- preview ---------------------------------------------------------------------------------------------------------


def preview_of(run: RunDir) -> SourcePreview:
    [source] = run.preview().sources
    return source


def test_rows_are_previewed_as_prepare_makes_them(with_model: Workplace) -> None:
    rows = [{"input": f"n{n} 漢", "target": " ".join(["½ cup", *["milk"] * n])} for n in range(20)]
    from transformers import AutoTokenizer  # with torch, which a test above shows *check* to do without

    folder = with_model.data / "milk"
    folder.mkdir()
    builtin.build(folder, [f"n{n} 1/2 cup milk" for n in range(20)], seed=1)
    with_model.rows("rows.jsonl", [{"input": "no target"}, *rows])
    tokens = {"max_input_tokens": 20, "max_target_tokens": 20, "max_invalid_fraction": 0.5, "validation": 0}
    run = with_model.job(model="./milk", data=tokens)
    with_model.check(run)
    shown = preview_of(run).rows
    assert [row.number for row in shown] == [2, 3, 21]
    prepared = PreparedDataset.open(Path(with_model.prepare(run)["data"]["prepared"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in shown:
        part, place = prepared.train, row.number - 2
        target = part.target(place)
        assert (row.input.tokens, row.target.tokens) == (len(part.input(place)), len(target))
        assert row.input.unknown == {"漢": 1} and row.input.cut_characters == 0
        kept = row.target.text[: row.target.characters - (row.target.cut_characters or 0)]
        assert str(tokenizer.decode(target, skip_special_tokens=True)).split() == kept.split()
        assert row.rewritten == {"½": 1} and row.target.text.startswith("1/2 cup")
    assert shown[0].target.cut_characters == 0 and (shown[2].target.cut_characters or 0) > 20


def test_the_built_in_model_has_no_tokenizer_yet(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(2))
    run = workplace.job()
    workplace.check(run)
    row, _ = preview_of(run).rows
    assert (row.input.text, row.input.tokens, row.input.cut_characters) == (pairs(2)[0]["input"], None, None)


def test_rows_whose_columns_nobody_recognizes_are_shown_as_they_are(workplace: Workplace) -> None:
    (workplace.data / "fragen.csv").write_text("frage;antwort\nWas?;Das\nWo?;" + "x" * 300 + "\nWer?;Ich\n")
    run = workplace.job("fragen.csv")
    with pytest.raises(BadData) as caught:
        workplace.check(run)
    assert caught.value.detail_code == "no_usable_columns" and len(caught.value.hint or "") < 150
    preview = run.preview()
    [source] = preview.unrecognized
    assert preview.sources == [] and (source.name, source.columns) == ("fragen.csv", ("frage", "antwort"))
    assert source.rows == [{"frage": "Was?", "antwort": "Das"}, {"frage": "Wo?", "antwort": "x" * 200}]
    nested = {"id": 1, "turns": [{"who": "\ud800", "what": None}]}
    workplace.rows("nested.jsonl", [nested] * 3)
    run = workplace.job("nested.jsonl", data={"input": "{id}", "target": "{turns[0].said}"})
    with pytest.raises(BadData):
        workplace.check(run)
    [source] = run.preview().unrecognized
    assert source.columns == ("id", "turns", "turns[0].what", "turns[0].who")
    assert source.rows == [{"id": "1", "turns": '[{"who": "\\ud800", "what": null}]'}] * 2


def test_a_long_text_is_previewed_by_its_beginning(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", [{"input": "x" * 100_000, "target": "y"}, {"input": "a", "target": "b"}])
    run = workplace.job()
    workplace.check(run)
    row, _ = preview_of(run).rows
    assert (len(row.input.text), row.input.characters) == (2_000, 100_000)


def test_a_tokenizer_that_cannot_be_used_is_refused_before_prepare(with_model: Workplace) -> None:
    (with_model.data / "my-model" / "tokenizer.json").write_text("{}")
    assert refusal(with_model, model="./my-model").detail_code == "tokenizer_unusable"


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_model(workplace: Workplace) -> Workplace:
    """A data directory with `rows.jsonl` and the model folder `my-model`."""
    workplace.rows("rows.jsonl", pairs(20))
    folder = workplace.data / "my-model"
    folder.mkdir()
    builtin.build(folder, [text for row in pairs(20) for text in row.values()], seed=1)
    return workplace


def test_a_model_folder_is_counted_by_its_headers(with_model: Workplace) -> None:
    for name in ("./my-model", str(with_model.data / "my-model")):
        run = with_model.job(model=name)
        assert with_model.check(run)["plan"]["parameters"] == layout_of(builtin.CONFIG).parameters
        assert run.plan().model.folder == str(with_model.data / "my-model")


def test_a_bad_model_folder_is_refused_by_name(with_model: Workplace) -> None:
    folder, outside = with_model.data / "my-model", with_model.root / "elsewhere"

    def code(model: str = "./my-model") -> str:
        error = refusal(with_model, model=model)
        assert (error.reason, error.param) == ("rejected", "model")
        assert error.hint
        return error.detail_code

    assert code("./nowhere") == "model_not_found"
    assert code("./rows.jsonl") == "model_not_found"
    shutil.copytree(folder, outside)
    assert code(str(outside)) == "path_outside_data"
    assert code("./../elsewhere") == "path_outside_data"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    assert code() == "bad_safetensors"
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert code() == "bad_pickle"
    (folder / "pytorch_model.bin").rename(folder / "model.ckpt")
    assert code() == "no_weights"
    assert "model.ckpt" in str(refusal(with_model, model="./my-model"))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").unlink()
    assert code() == "no_tokenizer"
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert code() == "model_not_supported"
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert code() == "no_tokenizer", "it is causal"
    assert "of type 'llama', which the task seq2seq cannot" in str(
        refusal(with_model, model="./my-model", task="seq2seq")
    )
    (folder / "config.json").unlink()
    assert code() == "no_config"


def test_a_model_that_cannot_be_read_is_refused_with_the_chmod_that_helps(
    with_model: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(files: list[Path], source: str) -> None:  # root, as whom tests often run, may read anything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(files[0]))

    monkeypatch.setattr(model_files, "read_headers", closed)
    error = refusal(with_model, model="./my-model")
    assert (error.detail_code, error.hint) == ("file_unreadable", "in the data directory: chmod -R a+rX ./my-model")
    assert "model.safetensors cannot be read" in str(error)


@pytest.mark.parametrize(
    ("key", "value"), [("d_model", "wide"), ("num_layers", 0), ("d_ff", None), ("num_heads", True)]
)
def test_a_config_that_makes_no_sense_is_refused(with_model: Workplace, key: str, value: object) -> None:
    file = with_model.data / "my-model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    error = refusal(with_model, model="./my-model")
    assert (error.detail_code, error.param) == ("bad_config", "model")
    assert f"{key} is {value!r}" in str(error)


def test_a_tensor_in_two_shards_and_a_lost_shard_are_refused(with_model: Workplace) -> None:
    folder = with_model.data / "my-model"
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        shutil.copy(folder / "model.safetensors", folder / name)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    error = refusal(with_model, model="./my-model")
    assert error.detail_code == "bad_safetensors"
    assert f"is in {names[0]} and in {names[1]}" in str(error)
    (folder / names[1]).unlink()
    assert f"lacks {names[1]}, which its index names" in str(refusal(with_model, model="./my-model"))
    index.write_text("[]")
    assert "cannot be read" in str(refusal(with_model, model="./my-model"))


def test_a_hub_id_is_refused_without_a_hub(workplace: Workplace) -> None:
    workplace.rows("rows.jsonl", pairs(20))
    error = refusal(workplace, model="google/flan-t5-small")
    assert (error.detail_code, error.param) == ("hub_unreachable", "model")
    assert "HF_HUB_OFFLINE" in str(error)


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_t5_parameters_are_those_that_transformers_makes() -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    xl = {
        "d_model": 2048, "d_kv": 64, "d_ff": 5120, "num_layers": 24, "num_heads": 32, "vocab_size": 32128,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }  # fmt: skip
    assert layout_of(xl).parameters == 2_849_757_184
    for change in ({}, {"feed_forward_proj": "relu"}, {"num_decoder_layers": 5}, {"relative_attention_num_buckets": 8}):
        config = builtin.CONFIG | {"tie_word_embeddings": True} | change
        with torch.device("meta"):
            model = T5ForConditionalGeneration(T5Config(**config))
        tied = sum(parameter.numel() for parameter in model.parameters())
        assert layout_of(config).parameters == tied
        assert t5_shapes(config) == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        head = config["vocab_size"] * config["d_model"]
        assert layout_of(config | {"tie_word_embeddings": False}).parameters == tied + head
        assert layout_of(config | {"scale_decoder_outputs": False}).parameters == tied + head


def test_code_that_transformers_has_itself_is_not_needed(with_model: Workplace) -> None:
    folder = with_model.data / "my-model"
    config = json.loads((folder / "config.json").read_text())
    for classes, known in (
        ({"AutoConfig": "configuration_t5.T5Config", "AutoModel": "modeling_t5.T5ForConditionalGeneration"}, True),
        ({"AutoConfig": "configuration_t5.T5Config", "AutoModel": "modeling_t5.T5WithMore"}, False),
        ({"AutoTokenizer": ["tokenization.MyTokenizer", None]}, False),
    ):
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": classes}))
        run = with_model.job(model="./my-model")
        if not known:
            assert refusal(with_model, model="./my-model").detail_code == "remote_code"
        else:
            with_model.prepare(run)
            assert "auto_map" not in json.loads(Path(str(run.plan().model.folder), "config.json").read_text())
