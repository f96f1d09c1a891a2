"""The types that all formats and readers share: a row, a block of rows, a reader."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

from jobs.companions import LEFT_OUT
from jobs.data_names import uploaded_name

NOT_UTF8 = "not UTF-8"
"""What is wrong with a row that has a byte of another encoding."""
STRAY_QUOTE, DOUBTFUL_QUOTES = "stray quote", "quoted lines that may be rows"
BAD_CSV, UNCLOSED_QUOTE = "bad CSV", "unclosed quote"
QUOTING = (
    "say in data.csv_quoting what quotes mean: rfc4180 where a quoted field may hold lines, none where they are text"
)
NO_LABEL = f"{LEFT_OUT}the label -1 stands for none"
LABEL_TWICE = "the same label twice in a list"
NO_RESULT, NO_RESULT_CELL = "a formula without a result", "\U000ff0f0=\U000ff0f0"
"""Why a row is rejected, and the text that stands for such a cell: no text of people has it."""
NOT_ONE = "a list that is not one label"
NOT_A_CHAT = "not a chat"
SPECIAL = "a special token in the text"
REPAIRS = dict.fromkeys((STRAY_QUOTE, DOUBTFUL_QUOTES), QUOTING) | {
    LABEL_TWICE: "write each label of a row once, by its name; a vector of 0 and 1 is no list of labels",
    NO_RESULT: "open the workbook in a spreadsheet program and save it, so that it holds the results",
    NOT_ONE: "to learn several labels a row, add --set task.multi_label=true",
    NOT_A_CHAT: "write each chat as a list of turns with role and content (or from and value), or as the JSON text of "
    "one; give a column of plain texts another name, such as text",
    SPECIAL: "if the chat template has been applied to the texts already, give the turns themselves, in a column "
    "messages with role and content: the template is applied here; else take the token out of the texts",
}
"""What else helps with rows that cannot be read, by what is wrong with them."""


def in_shell(name: str) -> str:
    """The file that a job names, as a command takes it; of an uploaded data set, that of its name."""
    return shlex.quote(uploaded_name(name) or name)


def reencode(name: str) -> str:
    """What helps with a file that is not UTF-8."""
    plain = PurePath(uploaded_name(name) or name).name
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(PurePath(name).suffix.lower())
    if unpack is not None:
        plain = PurePath(plain).stem
    convert, file = "iconv -f WINDOWS-1251 -t UTF-8", in_shell(name)
    read = f"{unpack} {file} | {convert}" if unpack else f"{convert} {file}"
    return f"convert it to UTF-8, for example from Windows-1251: {read} > {shlex.quote(f'utf8-{plain}')}"


class Defect(Exception):
    """Why a row is rejected: a short stable phrase, such as "missing ingredients"."""


@dataclass(frozen=True)
class Row:
    """One row of a source. `columns` is None when it cannot be read, and `defect` says why."""

    number: int
    """JSON lines and CSV: the line on which it begins, counted from 1, as an editor shows it; workbooks: the row of the
    sheet; Parquet and JSON arrays: its place."""
    columns: Mapping[str, Any] | None
    defect: str | None
    text: str
    """The row as in the file, or nearly so: for the report on rejected rows."""
    noticed: str | None = None
    """Something odd about it, to be counted if it is kept."""


class Block(Protocol):
    """Some consecutive rows of one file, not parsed yet. Picklable."""

    @property
    def file(self) -> str:
        """Name of the file, for errors and the report of what was rejected."""

    @property
    def first(self) -> int:
        """Number of the first row (or blank line)."""

    def rows(self) -> Iterator[Row]:
        """The rows, blank lines left out."""


class Reader(Protocol):
    """A source that is read once, from its beginning."""

    @property
    def fraction(self) -> float:
        """Share of the source's bytes (Parquet: rows) read so far."""

    @property
    def blank_lines(self) -> int:
        """Blank lines skipped so far."""

    @property
    def reading(self) -> str | None:
        """What is read so far, and how, where names of files do not say: a file in an archive, a sheet, an encoding."""

    def blocks(self, size: int) -> Iterator[Block]:
        """All rows, in order, at most `size` in a block, fewer where they are large. Raises BadData."""
