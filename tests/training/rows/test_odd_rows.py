"""Every defect that a corpus may have: the row is kept whole, repaired, or rejected with the right reason."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jobs.disk.rundir import RunDir
from jobs.errors import BadData
from tests.training.workplace import SHARED_DATA, Workplace, dataset_of, pairs, rejected, texts_of, write_table
from tests.training.workplace import of_rows as of_rows
from worker.training.rows.text import Template, letters_and_digits, template
from worker.training.tasks.columns import RECIPE_INPUT, RECIPE_TARGET

KEPT = "kept"


def outcomes(run: RunDir, lines: int) -> list[str]:
    """[lines] what became of each: kept, or the reason why not."""
    said = [KEPT] * lines
    for entry in rejected(run):
        assert said[entry["line"] - 1] == KEPT, "a row is rejected once"
        said[entry["line"] - 1] = entry["reason"]
    return said


# -- one of each -----------------------------------------------------------------------------------------------------

ODD: list[tuple[str, Any, str, str]] = [
    ("bad JSON", '{"input": "a", "target"', "bad JSON", ""),
    ("no object", '["a", "b"]', "not a JSON object", ""),
    ("missing", {"input": "a cake"}, "missing target", ""),
    ("null", {"input": None, "target": "b"}, "missing input", ""),
    ("empty", {"input": "", "target": "b"}, "empty input", ""),
    ("blank", {"input": "a cake", "target": " \n\t"}, "empty target", ""),
    ("nothing visible", {"input": "\u00ad\u200b", "target": "b"}, "empty input", ""),
    ("an empty list", {"input": [], "target": "b"}, "empty input", ""),
    ("a list of blanks", {"input": ["", "  "], "target": "b"}, "empty input", ""),
    ("an object", {"input": "a cake", "target": {"step": "bake"}}, "an object in target", ""),
    ("NaN", '{"input": NaN, "target": "b"}', "missing input", ""),
    ("infinity", '{"input": Infinity, "target": "b"}', "wrong type in input", ""),
    ("NaN elsewhere", '{"input": "a loaf", "target": "b", "score": NaN}', KEPT, "a loaf"),
    ("a truth value", {"input": True, "target": "b"}, KEPT, "true"),
    ("a list in a list", {"input": ["a", ["b"]], "target": "b"}, "wrong type in input", ""),
    ("NUL", {"input": "a\0b", "target": "b"}, "control character U+0000", ""),
    ("escape", {"input": "a \x1b[31mcake", "target": "b"}, "control character U+001B", ""),
    ("Windows' dash", {"input": "peach \x96 halved", "target": "b"}, "control character U+0096", ""),
    ("half a pair", '{"input": "a\\ud83d", "target": "b"}', "half a surrogate pair", ""),
    ("Windows-1251", b'{"input": "\xf1\xeb\xe8\xe2\xea\xe8", "target": "b"}', "not UTF-8", ""),
    ("over-long", b'{"input": "' + b"x" * (5 << 20) + b'", "target": "b"}', "over-long line", ""),
    ("duplicate", pairs(1)[0], "duplicate", ""),
    ("blank item", {"input": ["1 egg", "", "2 cups milk"], "target": "mix it"}, KEPT, "1 egg; 2 cups milk"),
    ("number", {"input": 12, "target": "twelve"}, KEPT, "12"),
    ("fractions", {"input": "1½ cups, ¾ cup, 1⁄3 cup", "target": "b"}, KEPT, "1 1/2 cups, 3/4 cup, 1/3 cup"),
    ("quotes", {"input": "the “baker’s” cake", "target": "b"}, KEPT, "the \"baker's\" cake"),
    ("no-break space", {"input": "2\u00a0\u00a0eggs", "target": "b"}, KEPT, "2 eggs"),
    ("zero width", {"input": "but\u200bter and sug\u00adar", "target": "b"}, KEPT, "butter and sugar"),
    ("line separator", {"input": "flour\u2029sugar", "target": "b"}, KEPT, "flour sugar"),
    ("newline, tab", {"input": "flour\nand\tsugar", "target": "b"}, KEPT, "flour and sugar"),
    ("decomposed", {"input": "cre\u0300me", "target": "b"}, KEPT, "crème"),
    ("short", {"input": "a", "target": "b"}, KEPT, "a"),
]  # fmt: skip


def test_each_defect_by_itself(workplace: Workplace) -> None:
    """With the built-in tokenizer, learned from text in which all these letters occur."""
    known = [
        {"input": "crème; 0123456789 / ' \" mbutersgand, xyz", "target": f"{n} {row['target']}"}
        for n, row in enumerate(pairs(300))
    ]
    known[0] = pairs(1)[0]
    rows = [*known, *(row for _, row, _, _ in ODD)]
    workplace.rows("rows.jsonl", rows)
    run = workplace.job(data={"validation": 0.0, "max_invalid_fraction": 0.5, "max_input_tokens": 64})
    data = workplace.prepare(run)["data"]
    said = outcomes(run, len(rows))
    assert {name: said[len(known) + n] for n, (name, *_) in enumerate(ODD)} == {name: what for name, _, what, _ in ODD}
    kept = [(name, text) for name, _, what, text in ODD if what == KEPT]
    texts = texts_of(run)
    assert {name: found[0] for (name, _), found in zip(kept, texts[len(known) :], strict=True)} == dict(kept)
    assert data["kept"] == len(texts)
    assert data["kept"] + sum(data["rejected"].values()) + data["duplicates"] == data["rows_read"] == len(rows)
    assert data["unknown_tokens"] == 0
    assert (data["noticed"]["newlines"], data["normalized"]["½"]) == (1, 1)


# -- recipes with named defects ---------------------------------------------------------------------------------------

SET_ASIDE = {"no_ing": "empty ingredients", "no_dir": "empty directions", "control": "control character"}
"""Defects that make a recipe useless, and why it is rejected. All others are kept."""


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="shared data is not part of the repository")
def test_odd_recipes_by_their_named_defects(workplace: Workplace, t5_tokenizer: Path) -> None:
    shutil.copy(SHARED_DATA / "recipes_odd.jsonl.gz", workplace.data)
    content = gzip.decompress((workplace.data / "recipes_odd.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in content.split("\n")[:-1]]
    limits = {"max_input_tokens": 4096, "max_target_tokens": 4096}
    run = workplace.job(
        "recipes_odd.jsonl.gz",
        model=workplace.t5_model(t5_tokenizer),
        data={"validation": 0.0, "max_invalid_fraction": 0.5, **limits},
    )
    data = workplace.prepare(run)["data"]
    said = outcomes(run, len(rows))
    assert len(rows) == data["rows_read"] == 517

    for outcome, row in zip(said, rows, strict=True):
        assert row["odd"]
        if expected := tuple(reason for name, reason in SET_ASIDE.items() if name in row["odd"]):
            assert outcome.startswith(expected), row["id"]
        else:
            assert outcome in (KEPT, *(["duplicate"] if "exact_duplicate" in row["odd"] else [])), row["id"]

    # Of equal recipes the first is kept.
    texts = [(fill(RECIPE_INPUT, row), fill(RECIPE_TARGET, row)) for row in rows]
    first = {text: number for number, text in reversed(list(enumerate(texts)))}
    for number, outcome in enumerate(said):
        if outcome in (KEPT, "duplicate"):
            assert (outcome == KEPT) == (first[texts[number]] == number), rows[number]["id"]
    assert said.count("duplicate") == data["duplicates"] > 40

    # Kept means whole: every letter and digit of input and target, and no unknown token where a fraction was.
    kept = [text for text, outcome in zip(texts, said, strict=True) if outcome == KEPT]
    for whole, decoded in zip(kept, texts_of(run), strict=True):
        for before, after in zip(whole, decoded, strict=True):
            assert bare(after) == bare(before)
            assert after.count("<unk>") == sum(before.count(sign) for sign in "<¿‱") - before.count("<<")
    assert (data["truncated_inputs"], data["truncated_targets"]) == (0, 0)
    assert data["unknown_characters"].keys() <= set("<¿‱")
    assert data["normalized"]["½"] == sum(text.count("½") for pair in texts_read(rows, said) for text in pair)
    assert data["noticed"]["HTML tags"] >= 40


def texts_read(rows: list[dict[str, Any]], said: list[str]) -> list[tuple[str, str]]:
    """Texts of the rows that nothing but being a duplicate speaks against."""
    usable = [row for row, outcome in zip(rows, said, strict=True) if outcome in (KEPT, "duplicate")]
    return [(fill(RECIPE_INPUT, row), fill(RECIPE_TARGET, row)) for row in usable]


def fill(source: str, row: dict[str, Any]) -> str:
    """A template's text, or nothing where a column is empty."""
    filled: Template = template(source, "data")
    return filled.fill(row) if all(row[column] for column in filled.columns) else ""


def bare(text: str) -> bytes:
    """Letters and digits; º, which is meant as °, is none."""
    return letters_and_digits(text.replace("º", "°").replace("<unk>", ""))


# -- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
@pytest.mark.parametrize("csv_lists", [False, True])
def test_only_lists_are_joined_and_every_joining_is_counted(workplace: Workplace, name: str, csv_lists: bool) -> None:
    written = '["Knead it.", "Bake it."]'
    rows = [{"input": f"bread {n}", "target": written, "list": ["one", "two"]} for n in range(50)]
    write_table(workplace.data / name, rows)
    joined = csv_lists and name == "rows.csv"
    run = workplace.job(name, data={"validation": 0.0, "csv_lists": csv_lists})
    data = workplace.prepare(run)["data"]
    assert texts_of(run)[0][1] == ("Knead it. Bake it." if joined else written)
    assert data["rewritten"] == ({"list in target joined": 50} if joined else {})
    assert data["noticed"] == ({} if joined else {"a JSON array as the text of target": 50})
    [source] = json.loads((run.path / "dataset.json").read_text())["sources"]
    example = {"texts": 50, "example": {"before": written, "after": "Knead it. Bake it."}}
    assert source["rewritten"] == ({"list in target joined": example} if joined else {})
    if name != "rows.csv":
        run = workplace.job(name, data={"validation": 0.0, "input": "input", "target": "list"})
        assert workplace.prepare(run)["data"]["rewritten"] == {"list in list joined": 50}
        assert texts_of(run)[0][1] == "one; two"


def test_a_chat_as_json_in_a_table_is_a_chat(workplace: Workplace) -> None:
    chats = [
        [{"role": "user", "content": f"how, {n}?"}, {"role": "assistant", "content": f"so, {n}"}] for n in range(30)
    ]
    others = ['[{"role": "user"}]', "[not JSON", '["a", "b"]', "[]", "plain"]
    rows = [{"messages": json.dumps(chat), "note": others[n % 5]} for n, chat in enumerate(chats)]
    write_table(workplace.data / "rows.csv", rows)
    run = workplace.job("rows.csv", data={"validation": 0.0})
    assert workplace.check(run)["plan"]["read_as"] == "OpenAI chat"
    workplace.prepare_only(run)
    assert texts_of(run)[0] == ("how, 0?", "so, 0")
    run = workplace.job("rows.csv", data={"validation": 0.0, "input": "{messages.prompt}", "target": "{note}"})
    workplace.prepare(run)
    assert [target for _, target in texts_of(run)[:5]] == others, "all else stays a text"


NO_CHATS: dict[str, tuple[Any, str]] = {
    "cut off": ('[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hel', "not a chat"),
    "as Python prints it": ("[{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'a'}]", "not a chat"),
    "plain text": ("Hello", "not a chat"),
    "empty": ("[]", "not a chat"),
    "texts": ('["Hi", "Hello"]', "not a chat"),
    "without a reply": ('[{"role": "user", "content": "hi"}]', "a chat without a reply"),
    "without a text": ('[{"role": "user", "content": "hi"}, {"role": "assistant"}]', "a turn that is not text alone"),
    "nothing": ("", "empty {column}"),
}  # fmt: skip


@pytest.mark.parametrize("column", ["messages", "Conversations"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_chats_as_json_are_chats_in_every_format_and_all_else_in_their_column_is_rejected(
    name: str, column: str, workplace: Workplace
) -> None:
    role, text = ("role", "content") if column == "messages" else ("from", "value")
    good = [[{role: "user", text: f"how, {n}?"}, {role: "assistant", text: f"so, {n}"}] for n in range(30)]
    bad = {key: (written, why.format(column=column)) for key, (written, why) in NO_CHATS.items()}
    # An empty line of a table is no row.
    bad = {key: one for key, one in bad.items() if key != "nothing" or name != "rows.csv"}
    written = [*map(json.dumps, good), *(one for one, _ in bad.values())]
    write_table(workplace.data / name, [{column: one} for one in written])
    data = {"validation": 0.0, "max_invalid_fraction": 0.5}
    run = workplace.job(name, model="builtin:qwen-tiny", data=data)
    done = workplace.prepare(run)["data"]
    assert done["kept"] == len(good)
    assert done["rejected"] == dict(Counter(why for _, why in bad.values()))
    tokenizer = AutoTokenizer.from_pretrained(run.plan().model.folder)
    first = dataset_of(run).train.input(0).tolist()
    expected = [{"role": "user", "content": "how, 0?"}, {"role": "assistant", "content": "so, 0"}]
    assert first == tokenizer.apply_chat_template(expected, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_plain_texts_in_a_column_of_chats_are_refused_with_another_name_for_it(name: str, workplace: Workplace) -> None:
    texts = [f"Line {n} of a story." for n in range(30)]
    write_table(workplace.data / name, [{"messages": text} for text in texts])
    with pytest.raises(BadData, match="not a chat: 30") as caught:
        workplace.check(workplace.job(name, model="builtin:qwen-tiny"))
    assert "another name, such as text" in str(caught.value.hint)
    write_table(workplace.data / name, [{"text": text} for text in texts])
    assert workplace.prepare(workplace.job(name, model="builtin:qwen-tiny"))["data"]["kept"] == 30


# -- tables with stray quotes -----------------------------------------------------------------------------------------


def test_stray_quotes_cost_their_own_rows(workplace: Workplace) -> None:
    rows = [f"question {n} about bread,answer {n}: knead and bake it" for n in range(1_000)]
    rows[500] = '"' + rows[500]  # closed by the next one, as if by the rules
    rows[800] = rows[800] + '"'
    rows[900] = '"' + rows[900]  # not closed at all
    rows[100] = '"question 100,\nwith\ntwo breaks",answer 100'
    rows[700] = rows[700].replace("bread", "cr\x81me")
    text = "\n".join(["input,target", *rows]) + "\n"
    (workplace.data / "rows.csv").write_bytes(text.encode("latin-1"))
    run = workplace.job("rows.csv", data={"validation": 0.0})
    data = workplace.prepare(run)["data"]
    assert (data["rows_read"], data["kept"]) == (1_000, 997)
    assert data["rejected"] == {"stray quote": 2, "not UTF-8": 1}
    entries = rejected(run)
    assert [(entry["line"], entry["reason"]) for entry in entries] == [
        (504, "stray quote"), (704, "not UTF-8"), (904, "stray quote")
    ]  # fmt: skip
    assert entries[0]["excerpt"].endswith(
        "(as one row it takes lines 504 to 804; as rows of their own, the next begins on line 505)"
    )
    assert dataset_of(run).train.input_lengths.max() < 50


def test_check_and_prepare_read_tables_in_fields_alike(workplace: Workplace) -> None:
    items = "\n".join(f"item{n},{n}" for n in range(150))
    rows = [f'List the stock of warehouse {n},"Here is the stock:\n{items}"' for n in range(100)]
    (workplace.data / "rows.csv").write_text("\n".join(["input,target", *rows]) + "\n")
    run = workplace.job("rows.csv", data={"validation": 0.0, "max_target_tokens": 4096})
    plan = workplace.check(run)["plan"]
    assert (plan["rows_looked_at"], plan["rows_estimated"], plan["invalid_rows"]) == (100, 100, {})
    data = workplace.prepare_only(run)["data"]
    assert (data["rows_read"], data["kept"]) == (100, 100)


def test_a_table_whose_quotes_stay_in_doubt_is_refused_with_the_key_that_helps(workplace: Workplace) -> None:
    (workplace.data / "rows.csv").write_text('input,target\nshow it,"a table:\n1,2\n3,4"\n')
    with pytest.raises(BadData, match="quoted lines that may be rows: 3") as caught:
        workplace.check(workplace.job("rows.csv"))
    assert str(caught.value.hint).startswith("say in data.csv_quoting what quotes mean")
    run = workplace.job("rows.csv", data={"validation": 0.0, "csv_quoting": "rfc4180"})
    assert workplace.prepare(run)["data"]["kept"] == 1
