"""Reading rows: every format gives the same ones, and what is wrong with a file is said."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.errors import BadData
from jobs.spec import CsvQuoting
from worker.training.rows.csv_rows import HEADER_AGAIN, CsvFormat
from worker.training.rows.lines import BLOCK_BYTES, LFS, MAX_LINE_BYTES, UNMARKED
from worker.training.rows.reading import open_files, open_source
from worker.training.rows.row import Block, Reader, Row, reencode
from worker.training.rows.sources import DataFile, Source
from worker.training.rows.windows_1252 import WINDOWS_1252

RAW_ODD = [
    "plain", "", 'say "hi"', "a,b;c\td|e", "two\nlines", "CRLF\r\nhere", "nul \0 byte", "½ é 漢 🍞", "'", " pad ",
]  # fmt: skip


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content))


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda content: content,
    "gz": gzip.compress,
    "zst": zstd,
    "gz of two": lambda content: gzip.compress(content[:100]) + gzip.compress(content[100:]),
    "zst of two": lambda content: zstd(content[:100]) + zstd(content[100:]),
    "zst after a skippable frame": lambda content: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstd(content),
}
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]


def encoded(text: str, encoding: str) -> bytes:
    mark = "\ufeff" if encoding.endswith(("-le", "-be")) else ""
    return (mark + text).encode(encoding)


def reader_of(tmp_path: Path, content: bytes, name: str = "rows.jsonl", **options: Any) -> Reader:
    path = tmp_path / name
    path.write_bytes(content)
    return open_files([DataFile(path, name, len(content))], "data.train", **options)


def all_rows(reader: Reader, size: int = 500) -> list[Row]:
    """All rows, each block having gone through a pickle, as on its way to a pool worker."""
    return [row for block in reader.blocks(size) for row in pickle.loads(pickle.dumps(block)).rows()]


def read(tmp_path: Path, content: bytes, name: str = "rows.jsonl", **options: Any) -> list[Row]:
    return all_rows(reader_of(tmp_path, content, name, **options))


def refusal(tmp_path: Path, content: bytes, name: str = "rows.jsonl", **options: Any) -> BadData:
    with pytest.raises(BadData) as caught:
        read(tmp_path, content, name, **options)
    assert caught.value.param == "data.train"
    assert str(caught.value).startswith(f"data.train: {name} ")
    assert caught.value.hint
    return caught.value


def odd_rows(count: int) -> list[dict[str, str]]:
    draw = random.Random(count)

    def text() -> str:
        return "".join(draw.choices(RAW_ODD, k=draw.randint(0, 4)))

    return [{"input": f"{n} {text()}", "target": text()} for n in range(count)]


def as_json_lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_csv(rows: list[dict[str, str]], **dialect: Any) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), **dialect)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def as_parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **options)
    return file.getvalue()


# -- all formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_every_format_gives_the_same_rows(tmp_path: Path, seed: int) -> None:
    rows = odd_rows(200 + seed)
    contents = {
        "rows.jsonl": as_json_lines(rows).encode(),
        "crlf.jsonl": as_json_lines(rows).replace("\n", "\r\n").encode(),
        "open.jsonl": as_json_lines(rows).rstrip("\n").encode(),
        "rows.csv": as_csv(rows).encode(),
        "unix.csv": as_csv(rows, lineterminator="\n", quoting=csv.QUOTE_ALL).encode(),
        "open.csv": as_csv(rows).rstrip("\r\n").encode(),
        "semicolon.csv": as_csv(rows, delimiter=";").encode(),
        "pipe.csv": as_csv(rows, delimiter="|").encode(),
        "tab.csv": as_csv(rows, delimiter="\t").encode(),
        "rows.tsv": as_csv(rows, delimiter="\t").encode(),
        "rows.parquet": as_parquet(rows, row_group_size=7),
        "zstd.parquet": as_parquet(rows, compression="zstd"),
    }
    for name, content in contents.items():
        found = read(tmp_path, content, name)
        assert [row.columns for row in found] == rows, name
        assert {row.defect for row in found} == {None}, name
        numbers = [row.number for row in found]
        if name.endswith("parquet"):
            assert numbers == list(range(1, len(rows) + 1))
        else:
            lines = content.decode().split("\n")
            assert all(str(n) in lines[number - 1] for n, number in enumerate(numbers)), name


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.tsv"])
def test_packing_and_encoding_change_nothing(tmp_path: Path, name: str, encoding: str, packing: str) -> None:
    rows = odd_rows(50)
    text = as_json_lines(rows) if name == "rows.jsonl" else as_csv(rows, delimiter="\t" if name == "rows.tsv" else ",")
    # The content decides, whatever the name says.
    assert [row.columns for row in read(tmp_path, PACKINGS[packing](encoded(text, encoding)), name)] == rows


def blocks_of(tmp_path: Path, name: str, size: int) -> list[bytes]:
    file = DataFile(tmp_path / name, name, (tmp_path / name).stat().st_size)
    return [pickle.dumps(block) for block in open_files([file], "data.train").blocks(size)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_blocks_are_the_same_every_time_and_of_bounded_size(tmp_path: Path, name: str) -> None:
    rows = [{"input": f"{n}", "target": "x" * (n % 7)} for n in range(1003)]
    (tmp_path / "rows.jsonl").write_text(as_json_lines(rows))
    (tmp_path / "rows.csv").write_text(as_csv(rows))
    (tmp_path / "rows.parquet").write_bytes(as_parquet(rows))
    pickles = blocks_of(tmp_path, name, 100)
    assert pickles == blocks_of(tmp_path, name, 100)
    blocks: list[Block] = [pickle.loads(block) for block in pickles]
    assert [len(list(block.rows())) for block in blocks] == [100] * 10 + [3]
    assert {block.file for block in blocks} == {name}
    assert [block.first for block in blocks] == [next(block.rows()).number for block in blocks]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_blocks_of_large_rows_hold_fewer_of_them(tmp_path: Path, name: str) -> None:
    rows = [{"input": f"{n}", "target": random.Random(n).randbytes(100_000).hex()} for n in range(40)]
    content = {"rows.jsonl": as_json_lines(rows).encode(), "rows.csv": as_csv(rows).encode()}
    reader = reader_of(tmp_path, content.get(name) or as_parquet(rows), name)
    sizes = [len(pickle.dumps(block)) for block in reader.blocks(500)]
    assert sum(sizes) > 8_000_000
    assert max(sizes) < 1_500_000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.zst", "rows.csv", "rows.parquet"])
def test_the_fraction_grows_from_nought_to_one(tmp_path: Path, name: str) -> None:
    rows = [{"input": random.Random(n).randbytes(4000).hex(), "target": "x"} for n in range(500)]
    lines = as_json_lines(rows).encode()
    contents = {
        "rows.jsonl": lines,
        "rows.jsonl.zst": zstd(lines),
        "rows.csv": as_csv(rows).encode(),
        "rows.parquet": as_parquet(rows),
    }
    reader = reader_of(tmp_path, contents[name], name)
    fractions = [reader.fraction]
    fractions += [reader.fraction for _ in reader.blocks(25)]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert 0.3 < fractions[len(fractions) // 2] < 0.7
    assert reader.fraction == 1.0


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    names = ["a/one.jsonl", "a/two.csv", "b/three.parquet"]
    rows = [{"input": f"{n}", "target": "t"} for n in range(30)]
    contents = [as_json_lines(rows[:10]).encode() + b"\n", as_csv(rows[10:20]).encode(), as_parquet(rows[20:])]
    files = []
    for name, content in zip(names, contents, strict=True):
        path = tmp_path / Path(name).name
        path.write_bytes(content)
        files.append(DataFile(path, name, len(content)))
    reader = open_source(Source("org/name", "data.train", "auto", tuple(files)))
    blocks = list(reader.blocks(7))
    assert [block.file for block in blocks] == [name for name in names for _ in range(2)]
    assert [block.first for block in blocks] == [1, 8, 2, 9, 1, 8]
    assert [row.columns for block in blocks for row in block.rows()] == rows
    assert (reader.fraction, reader.blank_lines) == (1.0, 1)


# Not getrusage: a child's ru_maxrss begins with that of the process that started it.
PROGRAM = """
import sys
from pathlib import Path
from worker.training.rows.reading import open_files
from worker.training.rows.sources import DataFile
for path in map(Path, sys.argv[1:]):
    reader = open_files([DataFile(path, path.name, path.stat().st_size)], "data.train")
    count = sum(1 for block in reader.blocks(500) for row in block.rows())
    print(count, Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst", "utf16.jsonl", "rows.csv", "rows.parquet"]
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    def write(count: int) -> Path:
        rows = [{"input": random.Random(n).randbytes(1500).hex(), "target": "x"} for n in range(count)]
        lines = as_json_lines(rows)
        contents: dict[str, Callable[[], bytes]] = {
            "rows.jsonl": lambda: lines.encode(),
            "rows.jsonl.gz": lambda: gzip.compress(lines.encode(), 1),
            "rows.jsonl.zst": lambda: zstd(lines.encode()),
            "utf16.jsonl": lambda: lines.encode("utf-16"),
            "rows.csv": lambda: as_csv(rows).encode(),
            "rows.parquet": lambda: as_parquet(rows, row_group_size=count, use_dictionary=False),
        }
        path = tmp_path / str(count) / name
        path.parent.mkdir()
        path.write_bytes(contents[name]())
        return path

    command = [sys.executable, "-c", PROGRAM, str(write(2_000)), str(write(10_000))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    small, large = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert (small[0], large[0]) == (2_000, 10_000)
    assert large[1] - small[1] < 12_000, "KiB, of 24,000 that the file is larger"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv", "rows.parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    rows = [{"input": f"{n}", "target": "t"} for n in range(100)]
    lines = as_json_lines(rows).encode()
    contents = {"rows.jsonl.gz": gzip.compress(lines), "rows.csv": as_csv(rows).encode(), "rows.jsonl": lines}
    content = contents.get(name) or as_parquet(rows)
    blocks = iter(reader_of(tmp_path, content, name).blocks(10))
    next(blocks)
    with open(tmp_path / name, "ab") as more:
        more.write(gzip.compress(b"{}\n") if name.endswith(".gz") else b"1,2\n")
    with pytest.raises(BadData) as caught:
        list(blocks)
    assert caught.value.detail_code == "file_changed"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
@pytest.mark.parametrize("content", [b"", b"\xef\xbb\xbf", b"\n\n", gzip.compress(b"", mtime=0), zstd(b"")])
def test_a_file_without_rows_has_none(tmp_path: Path, name: str, content: bytes) -> None:
    assert read(tmp_path, content, name) == []


NUMBERED = "".join(f"row {n}\n" for n in range(5000)).encode()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv", "rows.parquet"):
        file = DataFile(tmp_path / name, name, 1)
        with pytest.raises(BadData) as caught:
            list(open_files([file], "data.train").blocks(1))
        assert caught.value.detail_code == "file_missing"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(NUMBERED, mtime=0)[:-20], "after line "),
        (gzip.compress(b'{"a": 1}\n', mtime=0)[:10], "after line 0"),
        (b"\x1f\x8b is no archive", "after line 0"),
        (zstd(NUMBERED)[:-20], "Truncated"),
        (zstd(b"{}\n") + b"\x28\xb5\x2f\xfd whatever", "after line "),
        (b"\x28\xb5\x2f\xfd whatever", "after line 0"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_damaged_archive_is_named_with_the_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    error = refusal(tmp_path, content, name)
    assert error.detail_code == "damaged_archive"
    assert said in str(error)


@pytest.mark.parametrize("start", [b"BZh9", b"\xfd7zXZ\x00", b"PAR1", b"\x89PNG\r\n", b"%PDF", LFS])
def test_what_is_of_another_kind_is_named(tmp_path: Path, start: bytes) -> None:
    assert refusal(tmp_path, start + b"rest").detail_code == "not_supported"


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_tar_archive_is_named_however_it_is_packed(tmp_path: Path, packing: str) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("rows.jsonl"))
    assert "is a tar archive" in str(refusal(tmp_path, PACKINGS[packing](file.getvalue())))


def test_the_format_is_told_by_the_name_unless_it_is_said(tmp_path: Path) -> None:
    table = b"input,target\na,b\n"
    assert read(tmp_path, table, "ROWS.CSV")[0].columns == {"input": "a", "target": "b"}
    assert read(tmp_path, table, "rows.txt", format="csv")[0].columns == {"input": "a", "target": "b"}
    assert read(tmp_path, table, "rows.csv", format="jsonl")[0].defect == "bad JSON"
    assert read(tmp_path, b"{}", "rows")[0].columns == {}


# -- JSON lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", PACKINGS)
def test_lines_are_read_with_their_numbers_and_without_blank_ones(tmp_path: Path, packing: str) -> None:
    content = b'\xef\xbb\xbf{"a": 1}\r\n\n   \n{"b": "\xc3\xa9"}\n\xff\xfe\xff\n\xef\xbb\xbf{"c": 3}'
    reader = reader_of(tmp_path, PACKINGS[packing](content))
    assert all_rows(reader, size=2) == [
        Row(1, {"a": 1}, None, '{"a": 1}\r\n'),
        Row(4, {"b": "é"}, None, '{"b": "é"}\n'),
        Row(5, None, "not UTF-8", "\\xff\\xfe\\xff\n"),
        Row(6, {"c": 3}, None, '\ufeff{"c": 3}'),
    ]
    assert (reader.blank_lines, reader.fraction) == (2, 1.0)


@pytest.mark.parametrize("packing", ["plain", "gz", "zst"])
def test_an_over_long_line_is_passed_over_and_the_next_one_is_read(tmp_path: Path, packing: str) -> None:
    content = b"x" * (3 * MAX_LINE_BYTES) + b"\n{}\n" + b"y" * MAX_LINE_BYTES + b"\n" + b"z" * (MAX_LINE_BYTES + 1)
    rows = read(tmp_path, PACKINGS[packing](content))
    assert [(row.number, row.defect) for row in rows] == [
        (1, "over-long line"),
        (2, None),
        (3, "bad JSON"),
        (4, "over-long line"),
    ]
    assert rows[0].text[:200] == "x" * 200 and len(rows[0].text) < 10_000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question": "a", "answer"', "bad JSON"), ("[" * 100_000 + "\n", "bad JSON"),
        ('{"a": ' + "9" * 5000 + "}", "bad JSON"), ("[1]", "not a JSON object"),
        ('"text"', "not a JSON object"), ('{"a": 1, "a": 2}', "a key twice in an object"),
        ('{"a": {"b": 1, "b": 1}}', "a key twice in an object"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_object_says_why(tmp_path: Path, line: str, reason: str) -> None:
    rows = read(tmp_path, f"{{}}\n{line}".encode())
    assert [(row.defect, row.text) for row in rows] == [(None, "{}\n"), (reason, line)]


@pytest.mark.parametrize(
    "content",
    ['[{"a": 1}, {"a": "ü]"}]', '\ufeff\n[\n  {"a": 1},\n  {"a":\n "ü]"}\n]\n', ' [{"a":1}\r\n,{"a":"\\u00fc]"}]'],
)
def test_the_items_of_a_json_array_are_rows(tmp_path: Path, content: str) -> None:
    rows = read(tmp_path, content.encode(), "rows.json")
    assert [(row.number, row.columns) for row in rows] == [(1, {"a": 1}), (2, {"a": "ü]"})]


def test_an_array_is_read_in_pieces_and_an_item_that_is_no_object_costs_itself_alone(tmp_path: Path) -> None:
    items = [*({"number": number, "text": "ü" * 700} for number in range(3000)), 12345, "a text", b"\xff"]
    parts = [item if isinstance(item, bytes) else json.dumps(item, ensure_ascii=False).encode() for item in items]
    content = b"[" + b", ".join([*parts[:-1], b'{"text": "\xff"}']) + b"]"
    assert len(content) > 3 * BLOCK_BYTES
    rows = read(tmp_path, content, "rows.json")
    assert [row.columns for row in rows[:3000]] == items[:3000]
    assert [(row.number, row.defect) for row in rows[3000:]] == [
        (3001, "not a JSON object"), (3002, "not a JSON object"), (3003, "not UTF-8"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("content", "after", "why"),
    [
        ("\n  [\n", 0, "it does not end"), ("[" * 100_000, 0, "it ends within an item"),
        ('[{"a": 1}, {"a": oops, "b": "a long way from the end"}]', 1, "an item is no JSON"),
        ('[{"a": 1}', 1, "it does not end"),
        ('[{"a": 1} {"a": 2}]', 1, "no comma"), ('[{"a": 1},\n]', 1, "a comma without an item behind it"),
        ('[{"a": 1}, {"a": "x', 1, "it ends within an item"), ("[1]\n[2]\n", 1, "something follows the array"),
        ('[{"a": 1}, {"a": "' + "x" * 6_000_000 + ']', 1, "it ends within an item"),
        ('{"data": [{"a": 1}], "test": [{"a": 2}]}', 1, "something follows it in its object"),
        ('{"data": [{"a": 1}]} {"data": []}', 1, "something follows the array"), 
        ('{"data": [{"a": 1}]', 1, "its object does not end"),
    ],
)  # fmt: skip
def test_an_array_that_cannot_be_read_is_refused(tmp_path: Path, content: str, after: int, why: str) -> None:
    error = refusal(tmp_path, content.encode(), "rows.json")
    assert error.detail_code == "damaged_array"
    assert f"is a JSON array that cannot be read after item {after}: " in str(error) and why in str(error)


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ('{"data": [{"a": 1}, {"a": 2}]}', [{"a": 1}, {"a": 2}]),
        ('{\n "version": "1, \\"2\\"", "n": -3e1, "of": null, "rows": [\n{"a": 1}\n]\n}\n', [{"a": 1}]),
        ('{"examples": [{"a": [1, {"b": 2}]}]}', [{"a": [1, {"b": 2}]}]),
        # rows of their own
        ('{"data": [{"a": 1}]}\n{"data": [{"a": 2}]}\n', [{"data": [{"a": 1}]}, {"data": [{"a": 2}]}]),
        ('{"data": ["a"]}', [{"data": ["a"]}]), ('{"messages": [{"a": 1}]}', [{"messages": [{"a": 1}]}]),
    ],
)  # fmt: skip
def test_the_rows_of_an_object_that_holds_nothing_else_are_read(
    tmp_path: Path, content: str, columns: list[dict[str, Any]]
) -> None:
    assert [row.columns for row in read(tmp_path, content.encode(), "rows.json")] == columns


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.ndjson.gz"])
def test_lines_that_begin_as_an_object_of_rows_are_rows_by_their_name(tmp_path: Path, name: str) -> None:
    row = {"id": 1, "data": [{"role": "user", "content": "x" * 70_000}]}
    content = f"{json.dumps(row)}\n" * 2
    packed = gzip.compress(content.encode()) if name.endswith(".gz") else content.encode()
    assert [one.columns for one in read(tmp_path, packed, name)] == [row, row]


@pytest.mark.parametrize("size", [MAX_LINE_BYTES - 100, MAX_LINE_BYTES + 1, 6_000_000, 9_000_000])
@pytest.mark.parametrize("text", ["x", "]}", '\\"', "\\\\"])
def test_an_item_that_is_too_long_costs_only_its_own_row(tmp_path: Path, text: str, size: int) -> None:
    long = '{"a": "' + text * (size // len(text)) + '", "b": [[], "]"]}'
    rows = read(tmp_path, f'[{{"a": 1}}, {long}, {{"a": 3}}]'.encode(), "rows.json")
    assert [row.defect for row in rows] == [None, None if len(long) <= MAX_LINE_BYTES else "over-long line", None]
    assert rows[2].columns == {"a": 3} and (len(rows[1].text) < 10_000) == (len(long) > MAX_LINE_BYTES)


def test_an_item_that_is_nested_too_deeply_costs_only_its_own_row(tmp_path: Path) -> None:
    rows = read(tmp_path, ('[{"a": 1}, {"a": ' + "[" * 9_999 + "]" * 9_999 + '}, {"a": 3}]').encode(), "rows.json")
    assert [row.defect for row in rows] == [None, "bad JSON", None]


@pytest.mark.parametrize("value", ['"a\tb"', "9" * 5000, '"\x81"'])
def test_an_item_that_no_line_could_be_costs_only_its_own_row(tmp_path: Path, value: str) -> None:
    content = f'[{{"a": 1}}, {{"a": {value}}}, {{"a": 3}}]'
    rows = read(tmp_path, content.encode("latin-1"), "rows.json")
    assert [(row.number, row.columns) for row in rows] == [(1, {"a": 1}), (2, None), (3, {"a": 3})]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_text_that_is_no_unicode_is_rejected(tmp_path: Path, encoding: str) -> None:
    text = '{"a": "1"}\n{"a": "\ud83d"}\n{"a": "3"}\n'
    rows = read(tmp_path, text.encode(encoding, "surrogatepass"))
    assert [(row.number, row.defect) for row in rows] == [(1, None), (2, "not UTF-8"), (3, None)]
    rows = read(tmp_path, '{"a": "1"}\n{"a": "2"}'.encode(encoding)[:-1])
    assert [row.defect for row in rows] == [None, "not UTF-8"]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    ("name", "text"), [("rows.csv", "a,b\r\n1,größer\r\n"), ("rows.jsonl", '{"a": "1", "b": "größer"}')]
)
def test_utf_16_without_a_mark_is_recognized_and_said(tmp_path: Path, encoding: str, name: str, text: str) -> None:
    reader = reader_of(tmp_path, text.encode(encoding), name)
    assert [row.columns for row in all_rows(reader)] == [{"a": "1", "b": "größer"}]
    assert reader.reading == UNMARKED


# -- CSV -------------------------------------------------------------------------------------------------------------


def found(tmp_path: Path, content: str) -> list[tuple[int, list[Any] | str | None]]:
    rows = read(tmp_path, content.encode(), "rows.csv")
    return [(row.number, list(row.columns.values()) if row.columns is not None else row.defect) for row in rows]


def test_rows_of_a_table_have_the_lines_that_an_editor_shows(tmp_path: Path) -> None:
    content = '\n\na,b\n1,2\n\n"x\ny\n\nz",3\n"q ""r"" s",\n,\n5\n6,7,8\nlast,"row"\n,\n,,,\n"", \n'
    assert found(tmp_path, content) == [
        (4, ["1", "2"]), (6, ["x\ny\n\nz", "3"]), (10, ['q "r" s', ""]),
        (12, "wrong number of fields"), (13, "wrong number of fields"), (14, ["last", "row"]),
    ]  # fmt: skip
    reader = reader_of(tmp_path, content.encode(), "rows.csv")
    all_rows(reader)
    assert reader.blank_lines == 7


def test_the_header_of_another_file_that_was_joined_is_no_row(tmp_path: Path) -> None:
    assert found(tmp_path, "a,b\n1,2\na, b\n3,4\n") == [(2, ["1", "2"]), (3, HEADER_AGAIN), (4, ["3", "4"])]


@pytest.mark.parametrize("first", ['{"a": 1}', ' [{"a": 1},', "["])
def test_json_under_the_name_of_a_table_is_called_that(first: str, tmp_path: Path) -> None:
    error = refusal(tmp_path, f"{first}\n{first}\n".encode(), "rows.csv")
    assert error.detail_code == "bad_header" and "holds JSON" in str(error) and ".jsonl" in str(error.hint)


def test_a_header_alone_is_no_row(tmp_path: Path) -> None:
    assert found(tmp_path, "a,b") == found(tmp_path, "a,b\r\n") == []


def test_what_is_no_csv_is_rejected_with_its_text(tmp_path: Path) -> None:
    content = 'a,b\n"x"y,1\n2,3\n4,"5\n6"7\n1,2\r3,4\n5" pan,9\n'
    assert found(tmp_path, content) == [
        (2, "bad CSV"), (3, ["2", "3"]), (4, "bad CSV"), (6, "bad CSV"), (7, ['5" pan', "9"])
    ]  # fmt: skip
    assert [row.text for row in read(tmp_path, content.encode(), "rows.csv")][2] == '4,"5\n6"7\n'


def test_an_over_long_line_of_a_table_is_rejected(tmp_path: Path) -> None:
    content = "a,b\n" + "x" * (MAX_LINE_BYTES + 5) + "\n1,2\n" + '"' + "y" * (MAX_LINE_BYTES - 10) + '",3\n'
    assert [(row.number, row.defect) for row in read(tmp_path, content.encode(), "rows.csv")] == [
        (2, "over-long line"),
        (3, None),
        (4, None),
    ]


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("title, ,steps", "no name for column 2 of 3"),
        ("title,steps, title ", "two columns called 'title'"),
        ('"title"x,steps', "no CSV"),
        ("title,steps\r1,2\r", "CR alone"),
        ("x" * (MAX_LINE_BYTES + 1), "longer than 4 MiB"),
    ],
)
def test_a_bad_header_is_refused(tmp_path: Path, header: str, said: str) -> None:
    error = refusal(tmp_path, f"{header}\n1,2,3\n".encode(), "rows.csv")
    assert error.detail_code == "bad_header"
    assert said in str(error)


@pytest.mark.parametrize("first", ["sep=;", '"sep=;"', "SEP=;\r"])
def test_the_first_line_that_excel_writes_names_the_delimiter(tmp_path: Path, first: str) -> None:
    content = f"{first}\na,b;c\n1,2;3\n"
    assert found(tmp_path, content) == [(3, ["1,2", "3"])]
    assert read(tmp_path, content.encode(), "rows.csv")[0].columns == {"a,b": "1,2", "c": "3"}
    assert found(tmp_path, f"{first}\n") == []


def test_delimiters_of_empty_columns_behind_the_last_are_left_out(tmp_path: Path) -> None:
    assert found(tmp_path, "a,b,,\n1,2,,\n3,4\n5,6,7,\n8\n9,,\n") == [
        (2, ["1", "2"]), (3, ["3", "4"]), (4, "wrong number of fields"), (5, "wrong number of fields"),
        (6, ["9", ""]),
    ]  # fmt: skip
    assert refusal(tmp_path, b",,\n1,2,3\n", "rows.csv").detail_code == "bad_header"


def test_the_row_numbers_that_pandas_writes_are_left_out(tmp_path: Path) -> None:
    rows = read(tmp_path, b",title,steps\n0,Bread,Knead.\n1,Soup,Boil.\n", "rows.csv")
    assert [row.columns for row in rows] == [{"title": "Bread", "steps": "Knead."}, {"title": "Soup", "steps": "Boil."}]


PLAIN = [f"cake {n},mix and bake {n}" for n in range(400)]


def table_of(lines: list[str], header: str = "title,steps") -> str:
    return "\n".join([header, *lines, ""])


@pytest.mark.parametrize(
    ("stray", "closing"),
    [
        ('"Best soup,boil it', None),  # the next quote is that of a quoted field, or there is none
        ('soup,"boil it', None),
        ('"Best soup,boil it', 'cake 6",mix it'),  # another stray quote closes it: by the rules that is one row
        ('soup,"boil it', 'cake,mix it 6"'),
    ],
)
@pytest.mark.parametrize("distance", [5, 60, 300])
@pytest.mark.parametrize("quoted", [None, 'pie,"mix, and\nbake"', 'pie,"mix, and bake"'])
def test_a_stray_quote_costs_its_own_row(
    tmp_path: Path, stray: str, closing: str | None, distance: int, quoted: str | None
) -> None:
    end = [closing] if closing else [quoted] if quoted else []
    after = [quoted] if quoted else []
    lines = [*PLAIN[:10], stray, *PLAIN[10 : 10 + distance], *end, *PLAIN[350:], *after]
    [bad] = [row for row in read(tmp_path, table_of(lines).encode(), "rows.csv") if row.defect is not None]
    assert (bad.number, bad.defect) == (12, "stray quote")
    assert bad.text.startswith(f"{stray} (as one row it takes lines 12 to ")
    assert "the next begins on line 13)" in bad.text[:200]
    expected = [line.replace('"', "") if line == quoted else line for line in lines if line != stray]
    found = [
        ",".join(row.columns.values()) for row in read(tmp_path, table_of(lines).encode(), "rows.csv") if row.columns
    ]
    assert found == expected


def test_a_word_in_quotes_at_the_beginning_costs_its_own_row_of_a_tsv(tmp_path: Path) -> None:
    lines = ["soup\tboil", '"Quick" bread\tmix', *["cake\tbake"] * 50, '"Best soup\tboil it', *["cake\tbake"] * 50]
    rows = read(tmp_path, "\n".join(["title\tsteps", *lines]).encode(), "rows.tsv")
    assert [(row.number, row.defect) for row in rows if row.defect] == [(3, "bad CSV"), (54, "stray quote")]
    assert len(rows) == len(lines)


@pytest.mark.parametrize(
    "field",
    [
        "Mix flour, sugar\nBake, cool\nServe, hot",
        "1 egg, beaten\n2 onions, chopped\nsalt, to taste\n" * 30,
        "Mix.\n\nBake it for 1,000 s\nCool.",
        'Use a ""9 inch"" pan,\nbake,\nserve,\neat',
        "a,b\n1,2\n3,4\n5,6\n7,8",  # a table in a field
        '{\n ""a"": [\n  1,\n  2,\n  3,\n  4\n ],\n ""b"": 2\n}',
        "def f(a,b):\n    return a,b\nprint(f(1,2))",
        "day,close\n" + "2024-01-01,101.21\n" * 250 + "2024-12-31,99.02",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_field_of_several_lines_stays_whole(tmp_path: Path, field: str, first: bool) -> None:
    row = f'"{field}",end' if first else f'start,"{field}"'
    [_, found, _] = read(tmp_path, table_of([PLAIN[0], row, PLAIN[1]]).encode(), "rows.csv")
    assert found.columns is not None
    assert field.replace('""', '"') in found.columns.values()


@pytest.mark.parametrize("distance", [2, 40, 2000])
def test_it_does_so_where_the_last_field_may_be_empty(tmp_path: Path, distance: int) -> None:
    lines = [f"question {n}\tanswer {n}\t{'' if n % 10 else f'note {n}'}" for n in range(3000)]
    lines[500] = '"Where did ' + lines[500]
    lines[500 + distance] = f'question\tshe said."\tnote {distance}'
    rows = read(tmp_path, "\n".join(["title\tsteps\tnote", *lines]).encode(), "rows.tsv")
    assert [(row.number, row.defect) for row in rows if row.defect] == [(502, "stray quote")]
    assert len(rows) == len(lines)


def test_a_row_with_quotes_that_closes_a_stray_one_is_lost_with_nothing_else(tmp_path: Path) -> None:
    lines = [*PLAIN[:10], 'soup,"boil it', *PLAIN[10:60], '"pie, cold",mix it', *PLAIN[60:]]
    rows = read(tmp_path, table_of(lines).encode(), "rows.csv")
    assert [(row.number, row.defect) for row in rows if row.defect] == [(12, "stray quote")]
    assert len(rows) == len(lines)


LINES_LIKE_ROWS = ["a,b\n1,2\n3,4\nend", "a,b\nend", "one,two\n" + "1,2\n" * 90 + "end"]


@pytest.mark.parametrize("field", LINES_LIKE_ROWS)
@pytest.mark.parametrize(
    "before", ['pie,"mix, and bake"', 'pie,"mix\nand bake"', '"7"" pie",mix', '"pie","mix"'],
    ids=["delimiter", "newline", "quote", "every field"],
)  # fmt: skip
def test_a_quoted_field_whose_lines_read_as_rows_stays_whole_in_a_table_that_quotes(
    tmp_path: Path, field: str, before: str
) -> None:
    lines = [before, *(f'"{field}",x{n}' for n in range(3)), *PLAIN[:3]]
    rows = read(tmp_path, table_of(lines).encode(), "rows.csv")
    assert [row.columns for row in rows[1:4]] == [{"title": field, "steps": f"x{n}"} for n in range(3)]
    assert {row.noticed for row in rows[1:4]} == {"fields of several lines that could be rows"}
    assert [row.defect for row in rows] == [None] * 7


@pytest.mark.parametrize("field", LINES_LIKE_ROWS)
def test_the_same_lines_are_rows_in_a_table_with_quotes_that_mean_nothing(tmp_path: Path, field: str) -> None:
    rows = read(tmp_path, table_of(['a 9" pan,mix', f'"{field}",x', *PLAIN[:3]]).encode(), "rows.csv")
    assert [row.number for row in rows if row.defect] == [3]
    assert len(rows) == 1 + len(field.split("\n")) + 3


def table_with_stray_quotes(draw: random.Random, anywhere: bool) -> tuple[str, list[list[str]]]:
    """A table, a row a line, and its rows: quotes at ends of fields, or anywhere, on lines apart and next to others."""
    delimiter, columns, count = draw.choice(",;\t|"), draw.randint(2, 4), draw.randint(5, 60)
    words = ["mix", "bake", "egg", "a pan"]
    rows = [[f"{' '.join(draw.choices(words, k=2))} {row}" for _ in range(columns)] for row in range(count)]
    row = 0
    if anywhere:
        rows[0][0] = 'a 9" pan'
    for _ in range(draw.randint(1, 6)):
        row = min(row + 1, count - 1) if draw.random() < 0.4 else draw.randrange(1, count)
        column = draw.randrange(columns)
        field = rows[row][column]
        place = draw.choice([0, len(field), *([draw.randrange(len(field))] if anywhere else [])])
        rows[row][column] = f'{field[:place]}"{field[place:]}'
    header = [f"column {number}" for number in range(columns)]
    return "\n".join(delimiter.join(fields) for fields in [header, *rows]) + "\n", rows


@pytest.mark.parametrize("anywhere", [True, False])
def test_no_row_vanishes_uncounted_wherever_quotes_stray(tmp_path: Path, anywhere: bool) -> None:
    for seed in range(300):
        content, rows = table_with_stray_quotes(random.Random(seed), anywhere)
        found = read(tmp_path, content.encode(), "rows.csv")
        merged = [row for row in found if row.defect in (None, "wrong number of fields") and "\n" in row.text]
        assert len(found) + sum(row.text.count("\n") for row in merged) == len(rows), seed
        if anywhere:  # the table shows that its quotes mean nothing
            assert not merged, seed
            kept = {row.number: list(row.columns.values()) for row in found if row.columns is not None}
            plain = {number: row for number, row in enumerate(rows, start=2) if '"' not in "".join(row)}
            doubtful = {row.number for row in found if row.defect == "quoted lines that may be rows"}
            assert {number: row for number, row in plain.items() if number not in doubtful}.items() <= kept.items(), (
                seed
            )
        assert all(row.noticed or row.defect for row in merged), seed


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_whatever_a_writer_of_csv_writes_is_read_as_it_was(tmp_path: Path, quoting: Literal[0, 1]) -> None:
    for seed in range(200):
        draw = random.Random(seed)
        columns, delimiter = draw.randint(2, 4), draw.choice(",;\t|")
        numbers = [delimiter.join(["7"] * width) for width in (1, columns, columns, columns)]
        rows = [["column", *(f"column {number}" for number in range(1, columns))], ["a, b; c\td|e"] * columns]
        for _ in range(40):
            rows.append(["\n".join(draw.choices(numbers, k=draw.randint(1, 5))) for _ in range(columns)])
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator="\n").writerows(rows)
        found = read(tmp_path, text.getvalue().encode(), "rows.csv")
        assert [list((row.columns or {}).values()) for row in found] == rows[1:], seed


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("lines", [3, 150])
@pytest.mark.parametrize("plain", [0, 2000])
def test_tables_in_the_fields_of_a_table_stay_whole(
    tmp_path: Path, quoting: Literal[0, 1], lines: int, plain: int
) -> None:
    rows = [(f"question {n}", f"answer {n}") for n in range(plain)]
    for n in range(100):
        items = "\n".join(f"item{n + line},{n * line}" for line in range(lines))
        rows.append((f"List the stock of warehouse {n}", f"Here is the stock:\n{items}"))
    file = io.StringIO()
    csv.writer(file, quoting=quoting, lineterminator="\n").writerows([("input", "target"), *rows])
    for size in (7, 500):
        found = all_rows(reader_of(tmp_path, file.getvalue().encode(), "rows.csv"), size)
        assert [tuple((row.columns or {}).values()) for row in found] == rows


@pytest.mark.parametrize("gap", [2, 10, 99, 300])
@pytest.mark.parametrize("line", ['"question 1000,answer 1000', 'question 1000,"answer 1000'])
def test_two_stray_quotes_swallow_no_rows(tmp_path: Path, gap: int, line: str) -> None:
    lines = [f"question {n},answer {n}" for n in range(2000)]
    lines[10] = '"question 10, with a comma","answer ""10"""'
    lines[1000], lines[1000 + gap] = line, lines[1000 + gap] + '"'
    found = read(tmp_path, table_of(lines).encode(), "rows.csv")
    assert [(row.number, row.defect) for row in found if row.columns is None] == [(1002, "stray quote")]
    assert len(found) == 2000


def test_a_row_that_may_be_several_is_rejected_line_by_line_unless_the_job_says_what_quotes_mean(
    tmp_path: Path,
) -> None:
    lines = [*PLAIN[:30], 'soup,"boil', *PLAIN[30:40], 'cake,mix 6"', *PLAIN[40:]]
    lines[31:41] = ["a,b"] * 10  # nothing like the other rows
    content = table_of(lines).encode()

    def kept(quoting: CsvQuoting) -> list[int]:
        rows = read(tmp_path, content, "rows.csv", csv=CsvFormat(quoting=quoting))
        assert {row.defect for row in rows} <= {None, "quoted lines that may be rows"}
        assert len(rows) == (len(lines) if quoting != "rfc4180" else len(lines) - 11)
        return [row.number for row in rows if row.columns is not None]

    every = list(range(2, len(lines) + 2))
    assert kept("auto") == [number for number in every if not 32 <= number <= 43]
    assert kept("rfc4180") == [number for number in every if not 33 <= number <= 43]
    assert kept("none") == every


def test_where_quotes_mean_nothing_they_are_part_of_the_text(tmp_path: Path) -> None:
    content = b'input\ttarget\n"Yes," he said.\t"So"\n"\t6"\n"a"\t"b"\nc\td\n'
    rows = read(tmp_path, content, "rows.tsv", csv=CsvFormat(quoting="none"))
    assert [tuple((row.columns or {}).values()) for row in rows] == [
        ('"Yes," he said.', '"So"'), ('"', '6"'), ('"a"', '"b"'), ("c", "d")
    ]  # fmt: skip


def test_quotes_that_are_removed_or_kept_against_the_rules_are_noticed(tmp_path: Path) -> None:
    rows = read(tmp_path, b'a,b\n1,2\n"x",y\n"x, y",z\n3, "z"\n', "rows.csv")
    removed = "quotes around a field that does not need them, removed"
    literal = "quotes in a field that does not begin with one, kept as text"
    assert [row.noticed for row in rows] == [None, removed, None, literal]
    assert [row.noticed for row in read(tmp_path, b'"a","b"\n"1","2"\n', "rows.csv")] == [None]


def test_lines_that_a_table_with_spaces_lost_to_a_quote_are_rows_too(tmp_path: Path) -> None:
    lines = [f"cake {n}, mix it" for n in range(150)]
    rows = read(tmp_path, table_of([*lines[:120], '"Best soup, boil it', *lines[120:]]).encode(), "rows.csv")
    assert [row.number for row in rows if row.defect] == [122]
    assert len(rows) == 151


@pytest.mark.parametrize("rest", ["1,2\n", f"1,{'x' * 1021}\n" * (1 << 13)], ids=["end", "many"])
def test_a_quote_that_is_not_closed_costs_its_own_row(tmp_path: Path, rest: str) -> None:
    reader = reader_of(tmp_path, f'a,b\n1,2\n3,"four\n{rest}'.encode(), "rows.csv")
    defects = [(row.number, row.defect) for row in all_rows(reader)]
    assert defects[:3] == [(2, None), (3, "stray quote"), (4, None)]
    assert len(defects) == 2 + rest.count("\n")


def test_a_quote_before_a_line_that_is_too_long_costs_both(tmp_path: Path) -> None:
    content = f'a,b\n3,"four\n{"x" * (2 * MAX_LINE_BYTES)}\n1,2\n'
    rows = read(tmp_path, content.encode(), "rows.csv")
    assert [(row.number, row.defect) for row in rows] == [(2, "unclosed quote"), (3, "over-long line"), (4, None)]


def test_a_byte_of_another_encoding_costs_its_own_row(tmp_path: Path) -> None:
    content = 'a,b\nü,y\ncrème,1\n"two\nlinés",2\nlast,3\n'.encode("cp1252").replace(b"\xfc", "ü".encode())
    rows = read(tmp_path, content, "rows.csv")
    assert [(row.number, row.defect) for row in rows] == [(2, None), (3, "not UTF-8"), (4, "not UTF-8"), (6, None)]
    assert rows[1].text.startswith("cr\\xe8me,1")


WESTERN = {
    "German": "Müßte der Käse übrigens größer sein? – 30 €",
    "French": "À l’été, l’élève a créé « une crème brûlée »…",
    "Spanish": "¿Dónde está el niño? ¡Mañana!",
    "Portuguese": "As instruções não estão na 1ª página; põe a maçã no forno, por favor, às três",
    "Italian": "Perché è così? È già lunedì, però la città è più bella",
    "Dutch": "Één reünie is geïnd, knieën",
    "Danish": "Rød grød med fløde på en blå ø, og æblerne er gode",
    "Swedish": "Åtta räksmörgåsar är för mycket",
    "Finnish": "Hyvää yötä, äiti, ja hölkyn kölkyn",
    "Catalan": "L’època és això: força, açò, il·lusió, ciència",
    "a quotation": "« C’est l’été\u00a0» – É\u00a0: à\u00a0« bientôt\u00a0»",
    "a name": "Müller, Größe, schön, möglich, für, über, natürlich, später, täglich, Bücher " * 8 + "Þór",
    "quotes": "the “baker’s” cake",
}
OTHERS = {
    "Russian": ("Доброе утро, как дела", "cp1251"),
    "Greek": ("Καλημέρα σας", "cp1253"),
    "Turkish": ("Siparişim hâlâ gelmedi, ne zaman ulaşır?", "cp1254"),
    "Romanian": ("Aş vrea să îmi returnaţi banii", "cp1250"),
    "Hungarian": ("Az időben érkezett, köszönöm a gyors előkészítést", "cp1250"),
    "Croatian": ("Paket je oštećen, čekam odgovor već tjedan dana", "cp1250"),
    "Slovene": ("Naročilo še ni prišlo, prosim za obvestilo, čakam", "cp1250"),
    "Czech": ("Příští týden přijdu pro zboží, děkuji", "cp1250"),
    "Lithuanian": ("Prašau grąžinti pinigus už šį užsakymą", "cp1257"),
    "Latvian": ("Lūdzu atmaksāt naudu, paldies, gaidu ziņu šodien", "cp1257"),
    "Polish": ("Proszę się pośpieszyć, bo już północ, właśnie", "cp1250"),
    "Chinese": ("你好，今天天气很好", "gbk"),
    "Japanese": ("おはようございます", "shift-jis"),
    "DOS": ("größer, schöner", "cp850"),
    "Macintosh": ("größer, schöner, möglich", "mac-roman"),
    "damaged UTF-8": ("größer", "utf-8"),
}


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv.gz", "rows.jsonl", "rows.json"])
def test_text_that_is_not_utf8_is_read_as_windows_1252_where_it_looks_like_it(tmp_path: Path, name: str) -> None:
    rows = [{"ä": text, "b": str(number)} for number, text in enumerate(["ASCII", *WESTERN.values(), "ASCII"])]
    if "json" in name:
        text = json.dumps(rows, ensure_ascii=False) if name.endswith(".json") else as_json_lines(rows)
    else:
        text = as_csv(rows, delimiter="\t" if ".tsv" in name else ",")
    content = text.encode("cp1252")
    reader = reader_of(tmp_path, gzip.compress(content) if name.endswith(".gz") else content, name)
    found = all_rows(reader, 2)
    assert [row.columns for row in found] == rows
    assert all(row.noticed == WINDOWS_1252 for row in found[1:-1]) and found[-1].noticed in (None, WINDOWS_1252)
    assert reader.reading == WINDOWS_1252


@pytest.mark.parametrize("language", OTHERS)
def test_no_other_encoding_is_taken_for_windows_1252(tmp_path: Path, language: str) -> None:
    text, encoding = OTHERS[language]
    content = b'{"a": "' + text.encode(encoding) + (b"\xc3" if encoding == "utf-8" else b"") + b'"}\n'
    rows = read(tmp_path, b'{"a": "b"}\n' + content * 9)
    assert [row.defect for row in rows] == [None, *["not UTF-8"] * 9]


@pytest.mark.parametrize("header", ["text, as it came;label", "Guten Tag, mein Paket ist weg.;Lieferung", "a;b"])
def test_the_delimiter_is_that_of_the_lines_behind_the_first_too(tmp_path: Path, header: str) -> None:
    lines = [header, "where is it;delivery", "hello, it is broken, and wet;repair", "one;two"]
    rows = read(tmp_path, "\n".join(lines).encode(), "rows.csv")
    assert [tuple((row.columns or {}).values()) for row in rows] == [tuple(line.split(";")) for line in lines[1:]]


@pytest.mark.parametrize("language", WESTERN)
def test_a_file_of_one_western_language_is_read(tmp_path: Path, language: str) -> None:
    rows = read(tmp_path, as_json_lines([{"a": WESTERN[language]}] * 9).encode("cp1252"))
    assert [row.columns for row in rows] == [{"a": WESTERN[language]}] * 9


def test_one_odd_byte_does_not_make_a_file_of_utf8_one_of_windows_1252(tmp_path: Path) -> None:
    lines = [b'{"a": "cr\xe8me"}\n', *['{"a": "crème"}\n'.encode()] * 3]
    for first in (lines, lines[::-1]):
        rows = read(tmp_path, b"".join(first))
        assert sorted(str(row.defect) for row in rows) == ["None"] * 3 + ["not UTF-8"]
    assert [row.defect for row in read(tmp_path, b"\xef\xbb\xbf" + lines[0])] == ["not UTF-8"], "a mark decides"


def test_lines_of_utf8_and_damaged_ones_in_a_file_of_windows_1252_are_told_apart(tmp_path: Path) -> None:
    western = b'{"a": "cr\xe8me"}\n' * (BLOCK_BYTES // 10)
    rows = read(tmp_path, western + '{"a": "crème"}\n'.encode() + b'{"a": "\x81"}\n')
    assert {(row.columns or {}).get("a") for row in rows[:-1]} == {"crème"}
    assert [row.noticed for row in rows[-3:]] == [WINDOWS_1252, None, None] and rows[-1].defect == "not UTF-8"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("dataset:rows.csv", "WINDOWS-1251 -t UTF-8 < rows.csv > utf8-rows.csv"),
        ("dataset:rows.csv.zst", "zstd -dc rows.csv.zst | iconv -f WINDOWS-1251 -t UTF-8 > utf8-rows.csv"),
        ("new/my rows.csv", "WINDOWS-1251 -t UTF-8 < 'new/my rows.csv' > 'utf8-my rows.csv'"),
    ],
)
def test_a_command_that_helps_names_a_file(name: str, command: str) -> None:
    assert reencode(name).endswith(command)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_the_header_of_a_table_in_another_encoding_is_not_guessed(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path, "привет,b\n1,2\n".encode("cp1251"), name)
    assert error.detail_code == "wrong_encoding"
    assert "(line 1)" in str(error)
    read_with = {"rows.csv": "iconv -f WINDOWS-1251 -t UTF-8 < rows.csv > utf8-rows.csv"}
    packed = "gzip -dc rows.csv.gz | iconv -f WINDOWS-1251 -t UTF-8 > utf8-rows.csv"
    assert read_with.get(name, packed) in str(error.hint)


# -- Parquet ---------------------------------------------------------------------------------------------------------


def test_values_of_a_parquet_file(tmp_path: Path) -> None:
    table = pa.table(
        {
            "list": [["a", "b"], [], None],
            "large": pa.array(["x", None, "z"], pa.large_string()),
            "dictionary": pa.array(["u", "u", "v"]).dictionary_encode(),
            "number": [1, 2, 3],
            "struct": [{"k": 1}, None, {"k": 2}],
            "time": pa.array([1, 2, 3], pa.timestamp("ns")),  # no Python value without pandas
            "a.b": ["dot", "dot", "dot"],
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file)
    rows = read(tmp_path, file.getvalue(), "rows.parquet")
    assert [row.defect for row in rows] == [None] * 3
    columns = [dict(row.columns or {}) for row in rows]
    for column in columns:
        assert not isinstance(column.pop("time"), str | int | float | list)
    assert columns[0] == {
        "list": ["a", "b"], "large": "x", "dictionary": "u", "number": 1, "struct": {"k": 1}, "a.b": "dot"
    }  # fmt: skip
    assert [column["list"] for column in columns] == [["a", "b"], [], None]
    rows = read(tmp_path, file.getvalue(), "rows.parquet", columns={"number", "a.b", "nowhere"})
    assert [row.columns for row in rows] == [{"number": n, "a.b": "dot"} for n in (1, 2, 3)]
    assert [row.columns for row in read(tmp_path, file.getvalue(), "rows.parquet", columns={"nowhere"})] == [{}] * 3


def test_a_map_of_a_parquet_file_is_an_object(tmp_path: Path) -> None:
    maps = pa.array([[("a", 1), ("b", 2)], [], [("a", 1), ("a", 2)], None], pa.map_(pa.string(), pa.int64()))
    file = io.BytesIO()
    pq.write_table(pa.table({"map": maps, "n": [1, 2, 3, 4]}), file)
    rows = [dict(row.columns or {}) for row in read(tmp_path, file.getvalue(), "rows.parquet")]
    assert [row["n"] for row in rows] == [1, 2, 3, 4]
    assert [rows[n]["map"] for n in (0, 1, 3)] == [{"a": 1, "b": 2}, {}, None]
    assert not isinstance(rows[2]["map"], dict | list), "a key twice is no object"


def test_only_the_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    rows = [{"input": f"{n}", "image": random.Random(n).randbytes(10_000)} for n in range(200)]
    content = as_parquet(rows)
    broken = bytearray(content)
    broken[len(content) // 2 : len(content) // 2 + 5000] = b"\xff" * 5000  # in the images
    assert len(read(tmp_path, bytes(broken), "rows.parquet", columns={"input"})) == 200


def test_parquet_text_that_is_not_utf8_or_over_long_is_rejected(tmp_path: Path) -> None:
    texts = [b"fine", b"\xff\xfe", b"x" * (MAX_LINE_BYTES + 1), b"fine too"]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text))
    buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(texts))]
    file = io.BytesIO()
    pq.write_table(pa.table({"a": pa.Array.from_buffers(pa.string(), 4, buffers)}), file)
    assert [(row.number, row.defect) for row in read(tmp_path, file.getvalue(), "rows.parquet")] == [
        (1, None),
        (2, "not UTF-8"),
        (3, "over-long row"),
        (4, None),
    ]


def test_a_parquet_file_without_rows_has_none(tmp_path: Path) -> None:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), file)
    reader = reader_of(tmp_path, file.getvalue(), "rows.parquet")
    assert (all_rows(reader), reader.fraction) == ([], 1.0)


def damaged_parquets() -> dict[str, tuple[bytes, str]]:
    content = as_parquet([{"a": random.Random(n).randbytes(20).hex()} for n in range(3000)], row_group_size=1000)
    return {
        "cut": (content[:-1000], "damaged_file"),
        "begun": (b"PAR1", "damaged_file"),
        "page": (content[:50_000] + b"\xff" * 60_000 + content[110_000:], "damaged_file"),
        "footer": (content[:-200] + b"\xff" * 100 + content[-100:], "damaged_file"),
        "text": (b'{"a": 1}\n', "not_parquet"),
        "pointer": (LFS + b".example/v1\n", "not_parquet"),
        "gzip": (gzip.compress(content), "not_parquet"),
        "encrypted": (b"PARE" + content[4:], "not_parquet"),
    }


@pytest.mark.parametrize("kind", damaged_parquets())
def test_a_damaged_parquet_file_is_named(tmp_path: Path, kind: str) -> None:
    content, code = damaged_parquets()[kind]
    error = refusal(tmp_path, content, "rows.parquet")
    assert error.detail_code == code
    if code == "not_parquet":
        assert error.hint in ("see what it is with: file rows.parquet", "fetch it: git lfs pull")


def test_two_columns_of_a_name_are_refused(tmp_path: Path) -> None:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"]), file)
    error = refusal(tmp_path, file.getvalue(), "rows.parquet")
    assert (error.detail_code, "'a'" in str(error)) == ("bad_header", True)
