"""The types that all formats and readers share: a row, a block of rows, a reader."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Protocol

from jobs.companions import LEFT_OUT
from jobs.data_names import uploaded_name
from jobs.errors import BadData
from jobs.text.units import format_share

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
NOT_A_NUMBER, NOT_FINITE, DECIMAL_COMMA = "a score that is no number", "a score that is not finite", "a decimal comma"
NOT_A_CHAT = "not a chat"
NO_TOOLS = "the chat template writes no tools"
TOO_DEEP = "data nested too deeply"
SPECIAL = "a special token in the text"
REPAIRS = dict.fromkeys((STRAY_QUOTE, DOUBTFUL_QUOTES), QUOTING) | {
    LABEL_TWICE: "write each label of a row once, by its name; a vector of 0 and 1 is no list of labels",
    NO_RESULT: "open the workbook in a spreadsheet program and save it, so that it holds the results",
    NOT_ONE: "to learn several labels a row, add --set task.multi_label=true",
    NOT_A_NUMBER: "write each score as a number, such as 3.5; to learn texts as classes, set task: classification",
    NOT_FINITE: "leave out rows without a score, or write it as a number, such as 3.5",
    DECIMAL_COMMA: "write scores with a point: 3.5 in place of 3,5",
    NOT_A_CHAT: "write each chat as a list of turns with role and content (or from and value), or as the JSON text of "
    "one; give a column of plain texts another name, such as text",
    NO_TOOLS: "take a model whose chat template writes tools, or remove the column tools",
    SPECIAL: "if the chat template has been applied to the texts already, give the turns themselves, in a column "
    "messages with role and content: the template is applied here; else take the token out of the texts",
}
"""What else helps with rows that cannot be read, by what is wrong with them."""


_CR_TO_LF = r"tr '\r' '\n'"


def in_shell(name: str) -> str:
    """The file that a job names, as a command takes it; of an uploaded data set, that of its name."""
    return shlex.quote(uploaded_name(name) or name)


def reencode(name: str) -> str:
    """What helps with a file that is not UTF-8."""
    command = _filtered(name, "iconv -f WINDOWS-1251 -t UTF-8", "utf8")
    return f"convert it to UTF-8, for example from Windows-1251: {command}"


def end_in_lf(name: str) -> str:
    """What helps with a file whose lines end in CR alone."""
    return f"end lines in LF: {_filtered(name, _CR_TO_LF, 'lf')}"


def _filtered(name: str, command: str, prefix: str) -> str:
    """A line that sends a file, unpacked, through a command into another one beside it."""
    path = PurePath(uploaded_name(name) or name)
    unpack = {".gz": "gzip -dc", ".zst": "zstd -dc"}.get(path.suffix.lower())
    plain, file = path.stem if unpack else path.name, in_shell(name)
    read = f"{unpack} {file} | {command}" if unpack else f"{command} < {file}"
    return f"{read} > {shlex.quote(f'{prefix}-{plain}')}"


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


# -- row counts --------------------------------------------------------------------------------------------------------
# Counts over rows. The counts of consecutive parts add up to those of the whole.

_FIRST_ROWS = 3
_MOST_LEFT_OUT = 0.1
"""Where more rows cannot be used, their reason is to be mended: what is left would be another data set."""


@dataclass
class RowCounts:
    """Counts over the rows of one source."""

    read: int = 0
    """Rows, not blank lines."""
    kept: int = 0
    became: int = 0
    """Examples that those kept have become: a chat may become several."""
    duplicates: int = 0
    """Rows equal to an earlier one: rejected too, but nothing is wrong with the file, so that they do not count
    towards `max_invalid_fraction`."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rows that are not used, by reason: unusable ones, and those that are left out as their file asks."""
    first: dict[str, list[int]] = field(default_factory=dict)
    """By reason, the numbers of the first few rows."""
    normalized: Counter[str] = field(default_factory=Counter)
    """Characters that were rewritten, in all rows read."""
    noticed: Counter[str] = field(default_factory=Counter)
    """Rows with something odd that was left as it is, among all that can be used."""
    rewritten: Counter[str] = field(default_factory=Counter)
    """Texts that are not as they stood in the row, by what was done, among all that can be used."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Of each of these the first: before and after."""
    truncated: Counter[str] = field(default_factory=Counter)
    """By side (input, target): texts that were cut, among those kept. So are the next four."""
    tokens: Counter[str] = field(default_factory=Counter)
    """By side."""
    unknown_texts: Counter[str] = field(default_factory=Counter)
    """By side: texts with something that the tokenizer does not know."""
    unknown_tokens: int = 0
    """A run of unknown characters may be one token."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Characters that the tokenizer does not know."""

    @classmethod
    def from_json(cls, counts: Mapping[str, Any]) -> RowCounts:
        """From what `as_json` gave."""
        fields: dict[str, Any] = {name: Counter(it) if name in _COUNTERS else it for name, it in counts.items()}
        return cls(**{"became": fields["kept"]} | fields)  # earlier versions made one of each row

    def as_json(self) -> dict[str, object]:
        """As plain dictionaries and numbers."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    @property
    def invalid(self) -> int:
        """Unusable rows; those that are left out as their file asks are none."""
        return self._unusable().total()

    @property
    def left_out(self) -> int:
        """Rows that themselves say that they are not to be learned."""
        return self.rejected.total() - self.invalid

    def _unusable(self) -> Counter[str]:
        return Counter({reason: rows for reason, rows in self.rejected.items() if not reason.startswith(LEFT_OUT)})

    def reject(self, number: int, reason: str) -> None:
        """Row `number` cannot be used."""
        self.rejected[reason] += 1
        first = self.first.setdefault(reason, [])
        if len(first) < _FIRST_ROWS:
            first.append(number)

    def add(self, later: RowCounts) -> None:
        """Count the rows that follow."""
        for name in ("read", "kept", "became", "duplicates", "unknown_tokens"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(later, name))
        for reason, numbers in later.first.items():
            self.first[reason] = [*self.first.get(reason, []), *numbers][:_FIRST_ROWS]
        self.examples = later.examples | self.examples

    def check_invalid(self, limit: float, name: str, of: int) -> None:
        """Raise BadData (`too_many_invalid_rows`) if more than `limit` of `of` rows of `name` are unusable."""
        if self.invalid <= limit * of:
            return
        share = self.invalid / of
        [(most, _)] = self._unusable().most_common(1)
        hint = reencode(name) if most == NOT_UTF8 else REPAIRS.get(most, "repair these lines")
        if share <= _MOST_LEFT_OUT:  # rounded up, so that it helps
            enough = math.ceil(share * 1000) / 1000
            hint += f", or set data.max_invalid_fraction to {enough:g} to continue without them"
        elif share == 1 and most not in (NOT_UTF8, *REPAIRS):
            hint += ", or say in data.input and data.target what else to learn from"
        commonest = "; ".join(
            f"{reason}: {count} (line{'s' if count > 1 else ''} {', '.join(map(str, self.first[reason]))}"
            f"{', …' if count > _FIRST_ROWS else ''})"
            for reason, count in self._unusable().most_common(3)
        )
        raise BadData(
            f"{self.invalid:,} of {of:,} rows of {name} cannot be used ({format_share(share)}; "
            f"data.max_invalid_fraction allows {format_share(limit)}). Commonest: {commonest}",
            code="too_many_invalid_rows",
            param="data.max_invalid_fraction",
            hint=hint,
        )


_COUNTERS = ("rejected", "normalized", "noticed", "rewritten", "truncated", "tokens", "unknown_texts", "unknown")
