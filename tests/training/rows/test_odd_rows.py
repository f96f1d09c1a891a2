"""Every defect that a corpus may have: the row is kept whole, repaired, or set aside with the right reason."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jobs.rundir import RunDir
from tests.training.workplace import SHARED_DATA, Workplace, pairs
from worker.training.dataset.data import PreparedDataset
from worker.training.models import builtin
from worker.training.rows.text import RECIPE_INPUT, RECIPE_TARGET, Template, letters_and_digits, template

KEPT = "kept"


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


def outcomes(run: RunDir, lines: int) -> list[str]:
    """[lines] what became of each: kept, or the reason why not."""
    said = [KEPT] * lines
    for line in (Path(str(run.plan().data.prepared)) / "rejected.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert said[entry["line"] - 1] == KEPT, "a row is set aside once"
        said[entry["line"] - 1] = entry["reason"]
    return said


def kept_texts(run: RunDir) -> list[tuple[str, str]]:
    """Decoded, in the order of the file; `<unk>` where the tokenizer did not know."""
    plan = run.plan()
    tokenizer, rows = (
        AutoTokenizer.from_pretrained(plan.model.folder),
        PreparedDataset.open(Path(str(plan.data.prepared))).train,
    )
    return [
        (str(tokenizer.decode(rows.input(n)[:-1])), str(tokenizer.decode(rows.target(n)[:-1])))
        for n in range(len(rows))
    ]


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
    ("an object", {"input": "a cake", "target": {"step": "bake"}}, "wrong type in target", ""),
    ("a truth value", {"input": True, "target": "b"}, "wrong type in input", ""),
    ("a list in a list", {"input": ["a", ["b"]], "target": "b"}, "wrong type in input", ""),
    ("NUL", {"input": "a\0b", "target": "b"}, "control character U+0000", ""),
    ("escape", {"input": "a \x1b[31mcake", "target": "b"}, "control character U+001B", ""),
    ("Windows' dash", {"input": "peach \x96 halved", "target": "b"}, "control character U+0096", ""),
    ("half a pair", '{"input": "a\\ud83d", "target": "b"}', "half a surrogate pair", ""),
    ("Latin-1", b'{"input": "cr\xe8me", "target": "b"}', "not UTF-8", ""),
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
    """With the built-in tokenizer, learnt from text in which all these letters occur."""
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
    texts = kept_texts(run)
    assert {name: found[0] for (name, _), found in zip(kept, texts[len(known) :], strict=True)} == dict(kept)
    assert data["kept"] == len(texts)
    assert data["kept"] + sum(data["set_aside"].values()) + data["duplicates"] == data["rows_read"] == len(rows)
    assert data["unknown_tokens"] == 0
    assert (data["noticed"]["newlines"], data["normalised"]["½"]) == (1, 1)


# -- recipes with named defects ---------------------------------------------------------------------------------------

SET_ASIDE = {"no_ing": "empty ingredients", "no_dir": "empty directions", "control": "control character"}
"""Defects that make a recipe useless, and why it is set aside. All others are kept."""


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="shared data is not part of the repository")
def test_odd_recipes_by_their_named_defects(workplace: Workplace, t5_tokenizer: Path) -> None:
    model = workplace.data / "t5"
    model.mkdir()
    builtin.build(model, ["some text"], seed=0)
    for file in t5_tokenizer.iterdir():
        shutil.copyfile(file, model / file.name)
    shutil.copy(SHARED_DATA / "recipes_odd.jsonl.gz", workplace.data)
    content = gzip.decompress((workplace.data / "recipes_odd.jsonl.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in content.split("\n")[:-1]]
    limits = {"max_input_tokens": 4096, "max_target_tokens": 4096}
    run = workplace.job(
        "recipes_odd.jsonl.gz", model="./t5", data={"validation": 0.0, "max_invalid_fraction": 0.5, **limits}
    )
    data = workplace.prepare(run)["data"]
    said = outcomes(run, len(rows))
    assert len(rows) == data["rows_read"] == 517

    by_defect: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for outcome, row in zip(said, rows, strict=True):
        for defect in row["odd"]:
            by_defect[defect].append((outcome, row))
    assert sum(len(row["odd"]) > 0 for row in rows) == 517
    for defect, found in by_defect.items():
        for outcome, row in found:
            expected = [reason for name, reason in SET_ASIDE.items() if name in row["odd"]]
            if expected:
                assert outcome.startswith(tuple(expected)), (defect, outcome, row["id"])
            else:
                assert outcome in (KEPT, *(["duplicate"] if "exact_duplicate" in row["odd"] else [])), (
                    defect,
                    row["id"],
                )

    # Of equal recipes the first is kept.
    texts = [(fill(RECIPE_INPUT, row), fill(RECIPE_TARGET, row)) for row in rows]
    first = {text: number for number, text in reversed(list(enumerate(texts)))}
    for number, outcome in enumerate(said):
        if outcome in (KEPT, "duplicate"):
            assert (outcome == KEPT) == (first[texts[number]] == number), rows[number]["id"]
    assert said.count("duplicate") == data["duplicates"] > 40

    # Kept means whole: every letter and digit of input and target, and no unknown token where a fraction was.
    kept = [text for text, outcome in zip(texts, said, strict=True) if outcome == KEPT]
    for expected, decoded in zip(kept, kept_texts(run), strict=True):
        for before, after in zip(expected, decoded, strict=True):
            assert bare(after) == bare(before)
            assert after.count("<unk>") == sum(before.count(sign) for sign in "<¿‱") - before.count("<<")
    assert (data["truncated_inputs"], data["truncated_targets"]) == (0, 0)
    assert data["unknown_characters"].keys() <= set("<¿‱")
    assert data["normalised"]["½"] == sum(text.count("½") for pair in texts_read(rows, said) for text in pair)
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
