"""The first rows of a source: what they say about all of it, and those that people are shown."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from jobs.errors import BadData
from jobs.preview import UnrecognizedSource
from jobs.spec import BUILTIN_MODELS, DataSpec
from worker.training.dataset.encoding import RowTask
from worker.training.dataset.preview import Candidates
from worker.training.rows.characters import Rewriter
from worker.training.rows.companions import PROMPTS, SURVEYED, ColumnValues, values_of
from worker.training.rows.csv_rows import CsvBlock, CsvFormat
from worker.training.rows.origin import Head
from worker.training.rows.reading import format_of, open_files
from worker.training.rows.row import TOO_DEEP, Row, in_shell
from worker.training.rows.row_filter import RowFilter, Seen, UInt64
from worker.training.rows.text import OBJECT, RowReader, Templates

log = logging.getLogger("longhaul.trainer")
ROWS = 10_000
"""Rows looked at."""
_BLOCK, _PARQUET_BLOCK = 500, 16
"""Rows read at once; of Parquet few, for nobody knows before how long a value of a dictionary is that all of them have.
"""
_COMPARED = 500
"""Rows of each source on which a tokenizer that has to be converted is compared with what it is made from."""
_FIRST = 2
"""Rows shown of a source that is not recognized."""
_NAMED, _SHOWN = 50, 200
"""Columns named of it, and characters shown of a value."""
_MOST_OFFERED, _ROWS_OF_EACH, _LONGEST_OFFERED = 100, 10, 50
"""Labels that are offered as classes, rows that each has on average, and characters."""
_OFFERED_BY, _MOSTLY = 2000, 0.9
"""Rows looked at for it, and the share of them that has a label."""
_PLAIN_NAME = re.compile(r"\w[\w .-]{0,99}")
_GAPS = re.compile(r"\t|  ")
_PATH = re.compile(r"\w[\w .\[\]-]{0,99}")
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
_SPACES = 5
"""In the name of a column, at most."""
_CALLED_TARGET = re.compile(
    "target|output|response|reply|answer|completion|summary|translation|solution|chosen", re.IGNORECASE
)
_CALLED_INPUT = re.compile(
    "input|prompt|question|instruction|source|query|text|document|article|ticket|message|body|content|description|review|"
    "comment|sentence|utterance",
    re.IGNORECASE,
)
_CALLED_LABEL = re.compile("label|class|categor|intent|sentiment|topic|target", re.IGNORECASE)
_CLASSIFIER = next(model for model, task in BUILTIN_MODELS.items() if task == "classification")


@dataclass(frozen=True)
class Inspected:
    """What the first rows of a source say about all of it."""

    looked_at: int
    estimated: int
    """Usable rows in all of it."""
    invalid: dict[str, int]
    duplicates: int
    characters: list[tuple[int, int]]
    """Of what is only read and what is learned, of every usable row looked at."""
    keys: UInt64
    """Of every usable row looked at: equal rows have equal ones."""
    split_keys: UInt64 | None
    """Of every usable row, as a split takes them; None: not all rows were looked at."""
    noticed: Counter[str]
    """Usable rows with something odd that is left as it is."""
    layout: dict[str, int]
    """Usable rows whose target has white space that is not one space, by the fields of `SourcePreview`."""
    shown: Candidates
    """For the preview."""
    labels: Counter[str]
    """How many of the usable rows looked at have each."""
    first: list[str]
    """Texts of the first ones."""
    targets: Counter[str]
    """How many of them have each target; none where an input is missing or most targets are different."""
    reading: str | None
    """What of the files was read, and how, where their names do not say."""

    @property
    def all_rows(self) -> bool:
        """Whether all rows were looked at."""
        return self.split_keys is not None

    def only(self, new: npt.NDArray[np.bool_]) -> Inspected:
        """The same where only these [usable rows] are not in an earlier source; the rows that are shown stay."""
        count = int(new.sum())
        return replace(
            self,
            estimated=count if self.all_rows else max(1, round(self.estimated * count / len(new))),
            duplicates=self.duplicates + len(new) - count,
            characters=[one for one, is_new in zip(self.characters, new, strict=True) if is_new] or self.characters,
            split_keys=None if self.split_keys is None else self.split_keys[new],
        )


def without_earlier(found: list[tuple[Head, Inspected]]) -> list[Inspected]:
    """Of each source, in order, the rows that no source before it has, as *prepare* keeps them. Raises BadData
    (`no_rows`) where all rows of one were looked at, and none is left."""
    seen, left = Seen(), []
    for head, rows in found:
        new = seen.first_times(rows.keys)
        if rows.all_rows and not new.any():
            what = "are training rows" if head.param == "data.validation" else "are in the sources before it"
            raise BadData(
                f"{head.param}: no row of {head.name} is left to use: all {len(new):,} {what}", code="no_rows",
                param=head.param, hint="name other rows, or leave it out",
            )  # fmt: skip
        left.append(rows.only(new))
    return left


def inspect_rows(
    head: Head, data: DataSpec, templates: Templates, task: RowTask, rewriter: Rewriter | None
) -> Inspected:
    """Check the first rows. Raises BadData (`no_rows`, `too_many_invalid_rows`)."""
    rows = FirstRows(head, {column for one in templates if one for column in one.columns}, CsvFormat.of(data))
    row_filter = RowFilter(rows, RowReader(*templates, rewriter))
    characters: list[tuple[int, int]] = []
    keys: list[tuple[int, int]] = []
    labels: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    shown = Candidates()
    first: list[str] = []
    layout = dict.fromkeys(("rows_with_layout", "rows_with_line_breaks", "rows_with_gaps"), 0)
    for row, texts in row_filter.good_rows():
        characters.append(texts.characters)
        keys.append((texts.key, texts.split_key))
        labels.update(task.labels_of(texts))
        breaks, gaps = "\n" in (target := texts.target.strip()), _GAPS.search(target) is not None
        for name, has in zip(layout, (breaks or gaps, breaks, gaps), strict=True):
            layout[name] += has
        targets[texts.target if texts.input else ""] += 1
        if len(characters) <= _COMPARED:
            first += texts.all
        shown.add(row, sum(characters[-1]))
    counts = row_filter.counts
    total = counts.read if rows.all_of_them else max(counts.read, round(counts.read / max(rows.fraction, 1e-9)))
    if rows.all_of_them or rows.counted:  # an estimate refuses nothing: *prepare* reads all rows
        counts.check_invalid(data.max_invalid_fraction, head.name, total)
    if not counts.kept:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in counts.rejected.most_common(3))
        end = "" if rows.ended_at is None else f"; {rows.where}"
        raise BadData(
            f"{head.param}: no row of {head.name} can be used ({reasons}){end}", code="no_rows", param=head.param
        )
    estimated = max(1, round(counts.kept / counts.read * total))
    both = np.array(keys, np.uint64)
    return Inspected(
        counts.read,
        estimated,
        dict(counts.rejected),
        counts.duplicates,
        characters,
        both[:, 0],
        both[:, 1] if rows.all_of_them else None,
        counts.noticed,
        layout,
        shown,
        labels,
        first,
        targets if like_labels(targets) else Counter(),
        rows.reading,
    )


def survey(head: Head, csv: CsvFormat | None) -> dict[str, ColumnValues]:
    """What the columns hold in the first rows; of Parquet, only those that cost little to read, or have a name for it.

    Raises BadData as `FirstRows`.
    """
    columns = None
    if format_of(head.files[0], head.format, head.param) == "parquet":
        from worker.training.rows.parquet_rows import ParquetReader

        parquet = ParquetReader(head.files[0], head.param, ())
        next(parquet.blocks(1), None)
        columns = {name for name in parquet.names if name in parquet.narrow or name.lower() in PROMPTS}
    readable = (row.columns for row in FirstRows(head, columns, csv) if row.columns is not None)
    return values_of(islice(readable, SURVEYED))


def like_labels(found: Mapping[str, int]) -> bool:
    """Whether texts (how many rows have each) are so few, so short and so often repeated as labels are."""
    few = 1 < len(found) <= min(_MOST_OFFERED, sum(found.values()) // _ROWS_OF_EACH)
    return few and all(text and len(text) <= _LONGEST_OFFERED for text in found)


def label_offered(head: Head, columns: Collection[str], data: DataSpec, *, classifies: bool) -> str | None:
    """A hint that classifies the rows by a column that looks like labels; None: there is none, or no texts beside it.

    `classifies`: the model of the job does. Lists of labels count, each with its labels.
    """
    texts: dict[str, set[str]] = {}
    labels: dict[str, Counter[str]] = {}
    lists: set[str] = set()
    rows = 0
    named = {name for name in columns if _PLAIN_NAME.fullmatch(name) and name != "null"}
    for row in islice(FirstRows(head, named, CsvFormat.of(data)), _OFFERED_BY):
        rows += 1
        for name, value in (row.columns or {}).items():
            if name not in named:
                continue
            items = value if isinstance(value, list) else [value]
            if items and all(isinstance(item, str | int) and str(item).strip() for item in items):
                labels.setdefault(name, Counter()).update(str(item).strip() for item in items)
                if isinstance(value, list):
                    lists |= {name} if len(items) > 1 else set()
                elif isinstance(value, str):
                    texts.setdefault(name, set()).add(value)
    told = {name: found for name, found in texts.items() if 2 * len(found) > rows and any(" " in one for one in found)}
    classes = {name: found for name, found in labels.items() if found.total() > _MOSTLY * rows and like_labels(found)}
    if not told or not classes:
        return None
    # The first of those that are called an input, else of those that are not called an answer.
    text = min(told, key=lambda name: (_CALLED_TARGET.search(name) is not None, _CALLED_INPUT.search(name) is None))
    label = min(classes, key=lambda name: (_CALLED_LABEL.search(name) is None, _numbered(classes[name]), name))
    line = classifying(text, label, several=label in lists, classifies=classifies)
    return f"looks like {len(classes[label])} labels: classify `{text}` by `{label}`? Add {line}"


def texts_offered(head: Head, columns: Collection[str], data: DataSpec) -> str | None:
    """A hint that names two columns of texts, as likely ones for input and target; None: there are not two.

    Of an object its fields count, and of a list its first item.
    """
    texts: dict[str, set[str]] = {}
    rows = 0
    for row in islice(FirstRows(head, columns, CsvFormat.of(data)), _OFFERED_BY):
        rows += 1
        for name, value in (row.columns or {}).items():
            if isinstance(value, dict):
                within = {f"{name}.{key}": one for key, one in value.items()}
            else:
                within = {f"{name}[0]": value[0]} if isinstance(value, list) and value else {name: value}
            for place, one in within.items():
                if isinstance(one, str) and one.strip() and (place in texts or len(texts) < _NAMED):
                    texts.setdefault(place, set()).add(one)
    told = [name for name, found in texts.items() if 2 * len(found) > rows and _PATH.fullmatch(name)]
    if len(told) < 2:
        return None
    target = next((name for name in told if _CALLED_TARGET.search(name)), told[-1])
    others = [name for name in told if name != target]
    input = next((name for name in others if _CALLED_INPUT.search(name)), others[0])
    return f"say what to learn, perhaps `{target}` from `{input}`: {learning(f'{{{input}}}', f'{{{target}}}')}"


def header_offered(head: Head, data: DataSpec) -> str | None:
    """A hint for a table or a sheet whose header looks like a row; None: it looks like names, or this is none.

    A row is a line with a value that its own column has again further down, a number, or a sentence.
    """
    block = next(open_files(head.files, head.param, head.format, None, CsvFormat.of(data)).blocks(_BLOCK), None)
    sheet = format_of(head.files[0], head.format, head.param) == "workbook"
    if block is None or not (sheet or isinstance(block, CsvBlock)):
        return None
    rows = [row.columns for row in block.rows() if row.columns is not None]
    header = block.header if isinstance(block, CsvBlock) else tuple(rows[0])
    again = any(row.get(name) == name for row in rows for name in header)
    if not (again or any(_NUMBER.fullmatch(name) or name.count(" ") > _SPACES for name in header)):
        return None
    if not isinstance(block, CsvBlock):
        return "the first row of the sheet looks like any other, not like names of columns; put names in a row above it"
    names = block.delimiter.join(f"column{number}" for number, _ in enumerate(block.header, 1))
    line = names.replace("\t", "\\t")
    how = f": `sed -i '1i {line}' {in_shell(head.name)}`" if head.name.endswith((".csv", ".tsv")) else f": {line}"
    return f"its first line looks like a row, not like the names of columns; put names before it{how}"


def fields_offered(
    head: Head, message: str, templates: Templates, columns: Collection[str], data: DataSpec
) -> str | None:
    """A hint where most rows hold an object in place of a text, as `message` says of some: with a field of it, or as
    JSON. None: it is no object in most of them."""
    for column in {name for one in templates if one for name in one.columns}:
        if f"{OBJECT} in {column}:" not in message:
            continue
        rows = list(islice(FirstRows(head, [column], CsvFormat.of(data)), _OFFERED_BY))
        values = [row.columns.get(column) for row in rows if row.columns is not None]
        objects = [one for value in values for one in (value if isinstance(value, list) else [value])[:1]]
        objects = [one for one in objects if isinstance(one, dict)]
        if 2 * len(objects) <= len(rows):
            continue
        often = Counter(f"{column}.{key}" for value in values if isinstance(value, dict) for key in value)
        common = (name for name, count in often.items() if 2 * count > len(objects))
        fields = sorted(name for name in common if name in columns and _PATH.fullmatch(name))
        old, new = rf"\{{{re.escape(column)}(\??)\}}", rf"{{{fields[0] if fields else f'{column}|json'}\1}}"
        input, target = (re.sub(old, new, one.source) if one else None for one in templates)
        if not fields:
            return f"`{column}` holds objects; take them as JSON: {learning(input, target)}"
        named = ", ".join(field.removeprefix(f"{column}.") for field in fields[:_NAMED])
        whole = f"or the whole object, as JSON: {{{column}|json}}"
        return f"`{column}` holds objects with {named}; name what to learn, {whole}: {learning(input, target)}"
    return None


def learning(input: str | None, target: str | None, more: Mapping[str, str] | None = None) -> str:
    """What to add to a command so that its job learns from these. `more`: other keys."""
    set_to = {"data.input": input, "data.target": target, **(more or {})}
    return " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in set_to.items() if value is not None)


def classifying(input: str, target: str, *, several: bool = False, classifies: bool = False) -> str:
    """The same so that its job classifies; `classifies`: its model does already."""
    more = {"task.multi_label": "true"} if several else {}
    more |= {} if classifies else {"task.type": "classification", "model": _CLASSIFIER}
    return learning(input, target, more)


def _numbered(labels: Collection[str]) -> bool:
    return all(label.lstrip("-").isdecimal() for label in labels)


def unrecognized(head: Head, columns: Collection[str], data: DataSpec) -> UnrecognizedSource:
    """The first rows as they are in the file. `columns`: all names that a template can use."""
    first = FirstRows(head, columns, CsvFormat.of(data))
    readable = (row.columns for row in first if row.columns is not None)
    rows = [
        {
            _shown(name): _shown(value if isinstance(value, str) else _as_json(value))
            for name, value in columns_of_row.items()
        }
        for columns_of_row in islice(readable, _FIRST)
    ]
    in_order = dict.fromkeys([name for row in rows for name in row] + sorted(map(_shown, columns)))
    return UnrecognizedSource(name=head.name, columns=tuple(in_order)[:_NAMED], rows=rows, reading=first.reading)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value, default=str, ensure_ascii=False)
    except RecursionError:
        return TOO_DEEP


def _shown(text: str) -> str:
    """Its beginning. It may hold half a surrogate pair, which no file of ours can."""
    return text[:_SHOWN].encode("utf-8", "backslashreplace").decode()


class FirstRows:
    """The first ROWS rows of a source, or fewer where reading on would take too long (`Allowance`, and of the hub
    `Head.spent`); others as in `open_files`."""

    def __init__(self, head: Head, columns: Collection[str] | None = None, csv: CsvFormat | None = None) -> None:
        self._head = head
        self._reader = open_files(head.files, head.param, head.format, columns, csv)
        self.all_of_them = False
        parquet = {format_of(file, head.format, head.param) for file in head.files} == {"parquet"}
        self._block = _PARQUET_BLOCK if parquet else _BLOCK
        self.counted = len(head.files) == 1 and parquet
        """Whether `fraction` is one of rows, and exact."""
        self.ended_at: int | None = None
        """Number of the row behind which no more may be read; None: that was not the reason."""

    @property
    def fraction(self) -> float:
        """Share of the source that was read."""
        return self._reader.fraction

    @property
    def reading(self) -> str | None:
        """What of the files was read, and how, as of `Reader`."""
        return self._reader.reading

    @property
    def where(self) -> str:
        """The same in words."""
        return f"check reads no further than row {self.ended_at}: the rows so far are too large or take too long"

    def __iter__(self) -> Iterator[Row]:
        count, fetched, spent = 0, self._head.fetched, self._head.allowance.reading()
        for block in self._reader.blocks(self._block):
            read = 0
            for row in block.rows():
                if count == ROWS:
                    return
                yield row
                count, read = count + 1, read + len(row.text)
            if count and spent(read):  # at the end of a block, as far as `fraction` goes
                self.ended_at = row.number
                log.warning("%s: %s: %s", self._head.param, self._head.name, self.where)
                return
            if self._head.fetched > fetched and self._head.spent:
                return
        self.all_of_them = True
