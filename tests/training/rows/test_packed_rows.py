"""Rows as offices give them: sheets of workbooks, and files in zip archives."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zipfile
import zlib
from pathlib import Path

import pytest

from jobs.errors import BadData
from tests.support.workbooks import (
    DATE,
    DECIMALS,
    DURATION,
    NAMED_ZEROS,
    TIME,
    ZEROS,
    cell,
    cells_of,
    ods,
    xlsx,
    zipped,
)
from tests.training.rows.test_reading import all_rows, read, reader_of, refusal
from tests.training.workplace import Workplace
from tests.training.workplace import of_rows as of_rows
from worker.training.rows import sheet, workbook
from worker.training.rows.reading import format_of, open_files
from worker.training.rows.row import NO_RESULT_CELL
from worker.training.rows.sources import DataFile
from worker.training.rows.workbook import OLE

TABLE: list[list[str | None]] = [["text", "label"], ["größer", "a"], [None, None], ["b", "c"]]
COLUMNS = [{"text": "größer", "label": "a"}, {"text": "b", "label": "c"}]
EXCEL_97 = (  # by xlwt: a sheet "Old"
    "c-rk)O=uHA6#izDZGLRiO-+SXD4}T8+KYJc(yj{HleKzLq@ameM7pG9$w576wdN=Yo)j;IUc6Mj_=6twA|8Z_9t1&5>d}*+(nFi|&C4vNZ4M3"
    "CpfcYwZ{EK5X69w)&D+epolll#9(I?p3PT8?;>XZZBNJ3&!HWgb`@Up@I!eXY_@@wy(n7YFc-HnNBG*u^cNqpAgkKT`7O0G25+f6NC*4FGWFIm@"
    "`Y=dT;4VoL=wh!rn4V?2ndyDDe9m+~OKvb7B-@fWg?W3Vf1irtlSVJ=5|I5q<~AQ$vIm`bEu;9#O;NQqalkvDasN(5Pq-DcpmiH|@{X5rOGwcI&f"
    "<rk2EGS7^+j6Cn=2O}`Ql1>q>lWS5eBB<pWy&6ViR74q$Y%;Zf*(NK<c0roC^gLa5GuQrA>Oy`}x`NC>*kJnU#4LTPt>P8%K95(Hz>DPjZY~l&6"
    ">OeS3E#J8GY1$rNYqYJT4?U4oCRvIR9xpz4r>wC!iQo9Q*~bu07TOj8t@RQHW`D(3Js+gxXDAC0q@@!sB1!|x=%`1RP6p5hmK7x8n$<x8o#5B3a"
    "t>3fr-_VSs=fEW;WZc9A1gIcIu@QG>Hn!FG-EakheK4R@yMx5Cs)9Ra?9ii++9ecs{vd7Ctoc&26q3n%1_6FO_c{7cuntg#GqXUnmigMI%#G#>~p"
    "`oFnp`oGC90>KlKBP_>raC=D)V<C!m5RP5`EPL?6Z915V0s97sy$q6D1NrU6hU8Noo#~qLWvVJx`%OO*^lvt<Cji<qW1T!yP@^xwos$vR~qqigU"
    "9~`OLfG&"
)


# -- workbooks -------------------------------------------------------------------------------------------------------


def test_rows_of_a_sheet_have_the_numbers_that_a_person_sees(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, xlsx({"One": cells_of(TABLE)}), "rows.xlsx")
    rows = all_rows(reader, 2)
    assert [(row.number, row.columns) for row in rows] == list(zip((2, 4), COLUMNS, strict=True))
    assert (reader.reading, reader.fraction) == ("sheet 'One'", 1.0)


def test_cells_are_what_they_mean(tmp_path: Path) -> None:
    header = cells_of([["whole", "part", "yes", "day", "moment", "formula", "error", "nothing", 2024, "long"]])
    values = (
        cell("A2", 3.0) + cell("B2", 0.1) + cell("C2", True) + cell("D2", 46023, DATE) + cell("E2", 46023.75, TIME)
        + '<c r="F2" t="str"><f>A2&amp;"x"</f><v>3x</v></c><c r="G2" t="e"><v>#N/A</v></c>' + cell("I2", "this year")
        + cell("J2", 1.0854629629629629, DURATION)
    )  # fmt: skip
    [row] = read(tmp_path, xlsx({"One": f'{header}<row r="2">{values}</row>'}), "rows.xlsx")
    assert row.columns == {
        "whole": 3, "part": 0.1, "yes": True, "day": "2026-01-01", "moment": "2026-01-01 18:00:00", "formula": "3x",
        "error": "", "nothing": "", "2024": "this year",
        "long": "26:03:04",
    }  # fmt: skip
    assert type(row.columns["whole"]) is int


def test_numbers_that_are_shown_with_zeros_before_them_are_read_as_shown(tmp_path: Path) -> None:
    columns = {
        "zip": (cell("A2", 501, ZEROS), "00501"), "long": (cell("B2", 1234567, ZEROS), "1234567"),
        "named": (cell("C2", 7, NAMED_ZEROS), "A&B-007"), "part": (cell("D2", 0.5, ZEROS), 0.5),
        "plain": (cell("E2", 501, DECIMALS), 501), "text": (cell("F2", "9", ZEROS), "9"),
        "sum": (f'<c r="G2" t="n" s="{ZEROS}"><f>A2+1</f><v>502</v></c>', "00502"),
    }  # fmt: skip
    cells = "".join(each for each, _ in columns.values())
    book = xlsx({"One": f'{cells_of([[*columns]])}<row r="2">{cells}</row>'})
    [row] = read(tmp_path, book, "rows.xlsx")
    assert row.columns == {name: value for name, (_, value) in columns.items()}


def test_cells_of_opendocument_are_what_they_show(tmp_path: Path) -> None:
    """Tabs, line breaks and more than a day, which the library leaves out."""
    text = "<text:p>a<text:tab/>b<text:line-break/>c</text:p></table:table-cell>"
    text = f'<table:table-cell office:value-type="string">{text}'
    times = (
        f'<table:table-cell office:value-type="time" office:time-value="{value}"><text:p>x</text:p></table:table-cell>'
        for value in ("PT26H03M04S", "PT01H30M00S", "PT100H00M00.5000S")
    )
    content = ods("One", [["text", "long", "short", "part"], [text, *times]])
    [row] = read(tmp_path, content, "rows.ods")
    assert row.columns == {"text": "a\tb\nc", "long": "26:03:04", "short": "01:30:00", "part": "100:00:00.5"}


def formulas(*values: str, settings: str = "") -> bytes:
    """A workbook with a column of numbers and one of formulas that have these results, as XML."""
    cells = "".join(
        f'<row r="{n}">{cell(f"A{n}", n)}<c r="B{n}"{value}</c></row>' for n, value in enumerate(values, start=2)
    )
    return xlsx({"One": cells_of([["text", "sum"]]) + cells}, settings=settings)


_CALCULATES = '<calcPr fullCalcOnLoad="1"/>'


@pytest.mark.parametrize(
    ("name", "content", "lacking"),
    [
        ("openpyxl.xlsx", formulas("><f>A2&amp;1</f><v/>", ' t="n"><f>A3&gt;1</f><v></v>', "><f>1</f><v>2</v>"), 2),
        ("xlsxwriter.xlsx", formulas("><f>A2*2</f><v>0</v>", "><f/><v>0</v>", settings=_CALCULATES), 2),
        ("zero.xlsx", formulas("><f>A2*2</f><v>0</v>", "><f/><v>1</v>", settings=_CALCULATES), 0),
        ("excel.xlsx", formulas(' t="str"><f>""</f><v></v>', '><f t="shared" si="0"/><v>0</v>'), 0),
        ("rows.ods", ods("One", [["text", "sum"], ["1", '<table:table-cell table:formula="of:=[.A2]&gt;1"/>']]), 1),
    ],
)
def test_formulas_whose_result_the_file_does_not_hold_are_said(
    tmp_path: Path, name: str, content: bytes, lacking: int
) -> None:
    reader = reader_of(tmp_path, content, name)
    found = [(row.columns or {})["sum"] for row in all_rows(reader)]
    assert found.count(NO_RESULT_CELL) == lacking
    said = f"column 'sum' has {lacking} formulas whose result the file does not hold"
    assert (said in str(reader.reading)) == bool(lacking)


def test_rows_that_need_a_formula_without_a_result_are_rejected_and_others_are_not(workplace: Workplace) -> None:
    (workplace.data / "rows.xlsx").write_bytes(formulas(*["><f>A2*2</f>"] * 9))
    plain = {"input": "text", "target": "{text}", "validation": 0.0}
    assert workplace.check(workplace.job("rows.xlsx", data=plain))["plan"]["rows_looked_at"] == 9
    with pytest.raises(BadData, match="a formula without a result: 9") as caught:
        workplace.check(workplace.job("rows.xlsx", data={**plain, "target": "{sum}"}))
    assert "save it" in str(caught.value.hint)


def test_cells_that_are_merged_downwards_all_have_the_value(tmp_path: Path) -> None:
    rows: list[list[str | None]] = [["kind", "text"], ["a", "1"], [None, "2"], [None, "3"], ["b", "4"]]
    merged = '<mergeCells><mergeCell ref="A2:A4"/></mergeCells>'
    found = read(tmp_path, xlsx({"One": cells_of(rows)}, behind=merged), "rows.xlsx")
    expected = [{"kind": kind, "text": str(n)} for n, kind in enumerate("aaab", start=1)]
    assert [row.columns for row in found] == expected
    covered = "<table:covered-table-cell/>"
    a, kind = (
        f'<table:table-cell office:value-type="string" table:number-rows-spanned="{over}"><text:p>{text}</text:p>'
        "</table:table-cell>"
        for text, over in (("a", 3), ("kind", 2))
    )
    opened = ods("A & B", [[kind, "text"], [covered, "text"], [a, "1"], [covered, "2"], [covered, "3"], ["b", "4"]])
    reader = reader_of(tmp_path, opened, "rows.ods")
    assert [row.columns for row in all_rows(reader)] == expected
    assert reader.reading == "sheet 'A & B', whose row 2 names the columns"


def test_the_first_visible_sheet_with_rows_is_read_and_the_others_are_named(tmp_path: Path) -> None:
    sheets = {"Cover": cells_of([["Our tickets"]]), "Lists": cells_of(TABLE), "Empty": "", "Rows": cells_of(TABLE, 3)}
    reader = reader_of(tmp_path, xlsx({**sheets, "Old": cells_of(TABLE)}, hidden=["Lists"]), "rows.xlsx")
    assert [(row.number, row.columns) for row in all_rows(reader)] == list(zip((4, 6), COLUMNS, strict=True))
    others = "sheet 'Cover', sheet 'Lists', sheet 'Empty', sheet 'Old'"
    assert reader.reading == f"sheet 'Rows', whose row 3 names the columns; not read: {others}"


def test_a_title_above_the_table_is_not_its_header_and_a_column_without_a_name_is_named(tmp_path: Path) -> None:
    rows: list[list[str | None]] = [
        ["All tickets of 2026"],
        [],
        ["text", "label", None],
        ["größer", "a", "a note"],
        ["b", "c"],
    ]
    reader = reader_of(tmp_path, xlsx({"One": cells_of(rows)}), "rows.xlsx")
    assert [row.columns for row in all_rows(reader)] == COLUMNS
    assert reader.reading == "sheet 'One', whose row 3 names the columns; not read: column C"


_LONG = [["a longer text, number one", "x"], ["another longer text", "y"], ["and a third long text", "x"]]
_NUMBERED = [[number, *row] for number, row in enumerate(_LONG)]


@pytest.mark.parametrize(
    ("above", "rows", "merged", "header"),
    [
        ([["Report", "2024"], ["text", "label"]], _LONG, "", 2),
        ([["レポート", "2024年"], ["text", "label"]], _LONG, "", 2),
        ([["Report", 2024], [], ["Author", "J. D."], ["text", "label"]], _LONG, "", 4),
        ([["Report", "Sales"], ["id", "text", "label"]], _NUMBERED, "", 2),
        ([["id", "Rows"], [None, "text", "label"]], [["c", *row] for row in _LONG], "A1:A2 B1:C1", 2),
        ([["Left", None, "Right"], ["a", "b", "c", "d"]], [row * 2 for row in _LONG], "A1:B1 C1:D1", 2),
        ([["text", "label"], []], _LONG, "A1:A2 B1:B2", 2),
        ([["Side", "text", "label"]], [[None, *row] for row in _LONG], "A1:A4", 1),
        ([["text", "label"]], [["t", "u", "a note"], *_LONG], "", 1),
        ([["text", "label"]], [[*row, f"note {number}"] for number, row in enumerate(_LONG)], "", 1),
        ([["text", 2024]], [["yes", "no"], *_LONG[:2]], "", 1),
        ([["text", "label", None]], [[*row, "2024-01-01"] for row in _LONG], "", 1),
        ([["input", "target"], []], [["hello", "bonjour"], *([row[0], row[0] * 2] for row in _LONG)], "", 1),
    ],
)
def test_names_of_columns_are_told_from_titles_and_groups_above_them(
    above: list[list[object]], rows: list[list[object]], merged: str, header: int
) -> None:
    ranges = "".join(f'<mergeCell ref="{each}"/>' for each in merged.split())
    book = xlsx({"One": cells_of([*above, *rows])}, behind=f"<mergeCells>{ranges}</mergeCells>" if merged else "")
    sheet.convert(book, written := io.StringIO())
    about, *lines = map(json.loads, filter(None, written.getvalue().splitlines()))
    assert (about["header"], len(lines)) == (header, len(rows))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.ods", ods("Old", [["text", "label"], ["größer", "3"], ["b", "true"]])),
        ("rows.xls", zlib.decompress(base64.b85decode(EXCEL_97))),
        ("rows.XLSM", xlsx({"Old": cells_of([["text", "label"], ["größer", 3], ["b", True]])})),
    ],
    ids=["ods", "xls", "xlsm"],
)
def test_workbooks_of_other_kinds_are_read_alike(tmp_path: Path, name: str, content: bytes) -> None:
    reader = reader_of(tmp_path, content, name)
    found = [json.dumps(row.columns, ensure_ascii=False).replace('"', "") for row in all_rows(reader)]
    assert found == ["{text: größer, label: 3}", "{text: b, label: true}"]
    assert reader.reading == "sheet 'Old'"


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (xlsx({"One": cells_of([["text", "label"]])}), "no_rows", "has no sheet with rows below"),
        (xlsx({"One": cells_of([["a", "a"], ["1", "2"]])}), "bad_header", "has two columns called 'a' in sheet 'One'"),
        (zipped({"[Content_Types].xml": "<Types/>", "word/document.xml": ""}), "damaged_file", "cannot be read as"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1 is no workbook", "damaged_file", "cannot be read as"),
        (OLE + "EncryptedPackage".encode("utf-16-le"), "encrypted", "is protected by a password"),
        (xlsx({"One": cells_of(TABLE)[:-15]}), "damaged_file", "cannot be read as a workbook"),
        (xlsx({"One": cells_of(TABLE)})[:-200], "damaged_archive", "is damaged"),
    ],
    ids=["no rows", "a column twice", "a text document", "no workbook", "a password", "a damaged sheet", "cut off"],
)
def test_a_workbook_that_cannot_be_read_says_why(tmp_path: Path, content: bytes, code: str, said: str) -> None:
    error = refusal(tmp_path, content, "rows.xlsx")
    assert error.detail_code == code and said in str(error)


@pytest.mark.parametrize(
    "cells",
    [
        cell("A1", "a") + cell("XFD1", "b") + '<row r="1048576">' + cell("XFD1048576", "c") + "</row>",
        cell("A1", "a") + '<row r="2">' + cell("A2", "b") + '</row><row r="30000">' + cell("XFD30000", "c") + "</row>",
    ],
    ids=["more cells than can be counted", "more cells than memory"],
)
def test_a_small_workbook_of_endless_cells_ends_its_own_process_alone(tmp_path: Path, cells: str) -> None:
    error = refusal(tmp_path, xlsx({"One": f'<row r="1">{cells}</row>'}), "rows.xlsx")
    assert (error.detail_code, sheet.too_large() in str(error)) == ("too_large", True)
    assert str(error.hint) == sheet.AS_CSV


def test_who_reads_no_further_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workbook, "KEPT_BYTES", 1000)
    rows = cells_of([["text"], *([str(n)] for n in range(30_000))])
    reader = reader_of(tmp_path, xlsx({"One": rows}), "rows.xlsx")
    blocks = reader.blocks(500)
    next(blocks)
    assert 0 < reader.fraction < 0.1
    children = Path("/proc/thread-self/children").read_text().split()
    blocks.close()  # type: ignore[attr-defined]  # a generator
    assert len(children) - len(Path("/proc/thread-self/children").read_text().split()) == 1


@pytest.mark.parametrize(("kept", "opened"), [(1 << 20, 1), (60, 3)], ids=["whole", "in part"])
def test_a_workbook_that_is_opened_again_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int, opened: int
) -> None:
    """Where more is kept than is read."""
    monkeypatch.setattr(workbook, "KEPT_BYTES", kept)
    begun: list[object] = []
    start = workbook.Workbook._start
    monkeypatch.setattr(workbook.Workbook, "_start", lambda book: begun.append(book) or start(book))  # type: ignore[func-returns-value]  # None
    content = xlsx({"One": cells_of(TABLE)})
    reader_of(tmp_path, content, "rows.xlsx")
    file = DataFile(tmp_path / "rows.xlsx", "rows.xlsx", len(content))
    for _ in range(3):
        assert [row.columns for row in all_rows(open_files([file], "data.train"))] == COLUMNS
    assert len(begun) == opened


def test_a_table_under_the_name_of_a_workbook_says_what_helps(tmp_path: Path) -> None:
    error = refusal(tmp_path, CSV.encode("utf-16"), "rows.xls")
    assert "is no workbook" in str(error) and ".csv" in str(error.hint)


def test_a_few_notes_beside_the_rows_are_not_taken_for_the_names_of_columns(tmp_path: Path) -> None:
    rows = [["text", "label"], *([f"t{n}", "a"] for n in range(40)), ["t", "a", "see", "note", "one"], ["u", "b"]]
    reader = reader_of(tmp_path, xlsx({"One": cells_of(rows)}), "rows.xlsx")
    assert [(row.columns or {}).get("text") for row in all_rows(reader)] == [f"t{n}" for n in range(40)] + ["t", "u"]


def test_a_workbook_under_the_name_of_a_table_says_what_it_is(tmp_path: Path) -> None:
    error = refusal(tmp_path, xlsx({"One": cells_of(TABLE)}), "rows.csv")
    assert "is a workbook" in str(error) and ".xlsx" in str(error.hint)


# -- archives --------------------------------------------------------------------------------------------------------

CSV = "text,label\ngrößer,a\n\nb,c\n"


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("rows.csv", CSV.encode()),
        ("a folder/rows.tsv", CSV.replace(",", "\t").encode("cp1252")),
        ("rows.jsonl.gz", gzip.compress("".join(json.dumps(row) + "\n" for row in COLUMNS).encode())),
        ("rows.json", json.dumps(COLUMNS).encode()),
    ],
    ids=["csv", "tsv", "jsonl.gz", "json"],
)
def test_the_one_file_of_an_archive_is_read(tmp_path: Path, member: str, content: bytes) -> None:
    others = {"a folder/": "", "README": "rows", "__MACOSX/._rows.csv": "x", ".DS_Store": "x"}
    reader = reader_of(tmp_path, zipped({**others, member: content}), "rows.zip")
    assert [row.columns for row in all_rows(reader)] == COLUMNS
    assert str(reader.reading).startswith(f"file {member!r} of the archive")
    assert reader.fraction == 1.0


def test_its_format_is_that_of_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "rows.zip").write_bytes(zipped({"rows.csv": CSV}))
    file = DataFile(tmp_path / "rows.zip", "rows.zip", 1)
    assert (format_of(file, "auto", "data.train"), format_of(file, "jsonl", "data.train")) == ("csv", "jsonl")


def encrypted(content: bytes) -> bytes:
    """The archive with the flag of a password in its local and central headers."""
    for magic, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(magic) + place
        content = content[:at] + b"\x01" + content[at + 1 :]
    return content


def xz_in_zip(tmp_path: Path) -> bytes:
    with zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("rows.csv", CSV)
    return (tmp_path / "x").read_bytes()


def test_an_archive_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    whole = zipped({"rows.csv": CSV * 999})
    cases = [
        (zipped({"a.csv": CSV, "b.csv": CSV}), "several_files", "holds 2 files (a.csv, b.csv)"),
        (zipped({}), "no_rows", "holds no file"),
        (zipped({".": CSV}), "no_rows", "holds no file"),
        (encrypted(zipped({"rows.csv": CSV})), "encrypted", "is protected by a password"),
        (xz_in_zip(tmp_path), "not_supported", "a method other than deflate"),
        (zipped({"rows.parquet": b"PAR1"}), "not_supported", "holds rows.parquet, and a file .parquet is read by"),
        (zipped({"rows.csv": xlsx({"One": ""})}), "not_supported", "inside an archive"),
        (whole[:60] + bytes(20) + whole[80:], "damaged_archive", "is damaged"),
        (whole[:-30], "damaged_archive", "is damaged: "),
        (b"no archive", "damaged_archive", "is damaged: "),
        (zipped({f"{number:03}{'x' * 60_000}": "" for number in range(20)}), "damaged_archive", "list of files is too"),
    ]
    for content, code, said in cases:
        error = refusal(tmp_path, content, "rows.zip")
        assert error.detail_code == code and said in str(error)


def test_an_archive_of_endless_rows_is_read_piece_by_piece(tmp_path: Path) -> None:
    line = b'{"a": "' + b"x" * 1000 + b'"}\n'
    (tmp_path / "rows.zip").write_bytes(zipped({"rows.jsonl": line * 200_000}))
    file = DataFile(tmp_path / "rows.zip", "rows.zip", (tmp_path / "rows.zip").stat().st_size)
    blocks = open_files([file], "data.train").blocks(10)
    assert [len(list(next(blocks).rows())) for _ in range(3)] == [10, 10, 10]


@pytest.mark.parametrize("name", ["rows.zip", "rows.xlsx"])
def test_a_packed_file_that_is_not_the_one_that_was_hashed_is_refused(tmp_path: Path, name: str) -> None:
    content = xlsx({"One": cells_of(TABLE)}) if name.endswith(".xlsx") else zipped({"rows.csv": CSV})
    (tmp_path / name).write_bytes(content)
    known = DataFile(tmp_path / name, name, 1).known("data.train", lambda: None)
    assert [row.columns for row in all_rows(open_files([known], "data.train"))] == COLUMNS
    (tmp_path / name).write_bytes(content + b"\0")
    assert "changed while it was read" in str(refusal_of(known))


def refusal_of(file: DataFile) -> Exception:
    with pytest.raises(Exception, match="changed") as caught:
        all_rows(open_files([file], "data.train"))
    return caught.value
