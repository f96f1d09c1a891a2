"""preview.json: some rows as the model gets them, written by *check* before anything is queued.

*prepare* writes it again for a built-in model, whose tokenizer it makes from the rows.
"""

from __future__ import annotations

from pydantic import Field

from jobs.companions import NO_COMPANIONS, CompanionColumns, UnreadColumn
from jobs.evaluation_metrics import LabelPlan
from jobs.frozen import Frozen

FILE = "preview.json"
LABELS_SHOWN = 20


def of_rows(*, all_rows: bool) -> str:
    """Behind a count: among which rows it was made."""
    return "of all rows" if all_rows else "of the first rows"


class TextPreview(Frozen):
    """The input or the target of a row."""

    text: str
    """What the model reads or learns to write: the template filled in, characters rewritten; its first 2,000
    characters."""
    characters: int
    """Of all of it."""
    tokens: int | None
    """Tokens in training, with those that the tokenizer adds. Null: *prepare* has yet to learn the built-in model's
    tokenizer from the rows; or it is a label, which is no tokens."""
    cut_characters: int | None
    """Characters at its end that the token limit (`data.max_input_tokens`, `data.max_target_tokens`) cuts off."""
    unknown: dict[str, int]
    """Characters that the tokenizer does not know, so the model cannot tell one from the other, and how often."""


class SpanPreview(Frozen):
    """A part of the text of a row."""

    text: str
    """As the model reads it, special tokens as written."""
    learned: bool
    """Whether the model learns to write it."""


class RowPreview(Frozen):
    """One row."""

    number: int
    """JSON lines and CSV: the line on which it begins, counted from 1; Parquet and JSON arrays: its place."""
    input: TextPreview
    """Of a pair of texts, the first."""
    second: TextPreview | None = None
    """Of a pair of texts, the second, with the tokens behind it; those before it count with the first."""
    target: TextPreview
    rewritten: dict[str, int]
    """Characters of both texts that were written differently (`data.normalize`), and how often."""
    spans: tuple[SpanPreview, ...] = ()
    """Task `causal`: the row as one text, in parts, up to where it is cut off, as far as tokens are known; its first
    2,000 characters. Of several examples the last."""
    earlier_examples: tuple[tuple[SpanPreview, ...], ...] = ()
    """The others, likewise, in the order of their replies: where the chat template writes earlier turns otherwise than
    the last, each reply is learned in a text of its own. Tokens and characters above are those of all together."""


class SourcePreview(Frozen):
    """What a source of training rows becomes."""

    name: str
    """As in the job."""
    weight: float
    """How often each of its rows occurs in an epoch."""
    reading: str | None = None
    """What of the file is read, and how, where its name does not say: the sheet of a workbook, the file in an archive,
    the encoding of the first rows."""
    read_as: str | None
    """What the rows were recognized as by their columns, such as `OpenAI chat`; null: the job names its templates."""
    input: str | None
    """Template, as resolved; null: there is a target alone."""
    target: str
    """Template, as resolved."""
    rows: list[RowPreview]
    """The first two usable rows, and the longest of those that *check* looked at."""
    rows_with_tools: int = 0
    """Usable rows among those that *check* looked at with a column `tools` beside their chat. It is not used: the chat
    template gets no tools."""
    rows_with_layout: int = 0
    """Usable rows among those that *check* looked at whose target has line breaks, tabs or several spaces in a row."""
    rows_with_line_breaks: int = 0
    """Those of them with line breaks."""
    rows_with_gaps: int = 0
    """Those of them with tabs or several spaces in a row."""
    loses_layout: bool = False
    """The tokenizer reads tabs and several spaces in a row as one space. False, too, as long as the tokenizer is not
    known."""
    loses_line_breaks: bool = False
    """It reads line breaks so."""
    can_keep_line_breaks: bool = False
    """`data.keep_line_breaks` would keep these."""
    companions: CompanionColumns = NO_COMPANIONS
    """Columns beside input and target that the rows are read by."""
    left_out: dict[str, int] = Field(default_factory=dict)
    """Rows among those that *check* looked at that these columns leave out, by reason."""
    duplicates: int = 0
    """Rows among those that *check* looked at that are equal to an earlier one, also of a source before, and are left
    out."""
    all_rows: bool = False
    """Whether *check* looked at all rows of the source; else at its first ones alone."""
    unread: tuple[UnreadColumn, ...] = ()
    """Columns that nobody reads, whose values in the first rows look as if they meant something."""

    @property
    def left_out_texts(self) -> tuple[str, ...]:
        """For people: which rows are left out, and how many."""
        equal = {"left out: equal to an earlier row": self.duplicates} if self.duplicates else {}
        of = of_rows(all_rows=self.all_rows)
        return tuple(f"{why}: {count:,} {of}" for why, count in (self.left_out | equal).items())

    @property
    def lost_layout(self) -> str | None:
        """For people, where the model cannot learn to write what the targets have."""
        breaks, rows = "", self.rows_with_gaps
        if self.loses_line_breaks:
            breaks, rows = "line breaks, ", self.rows_with_layout
        if not (self.loses_layout and rows):
            return None
        advice = "to keep them, write them as a word in the rows, or train a causal model"
        if self.can_keep_line_breaks and self.rows_with_line_breaks:
            advice = "to keep the line breaks, add --set data.keep_line_breaks=true"
        return (
            f"the targets of {rows:,} of the first rows have {breaks}tabs or several spaces in a row: the tokenizer "
            f"reads them as one space, and the model will write no others; {advice}"
        )

    @property
    def tokenized(self) -> bool:
        """Whether tokens are known: a built-in model has a tokenizer only once the job is prepared."""
        return not self.rows or self.rows[0].input.tokens is not None


class UnrecognizedSource(Frozen):
    """A source of training rows in which nothing to learn from is found: the job has to name columns."""

    name: str
    """As in the job."""
    columns: tuple[str, ...]
    """What `data.input` and `data.target` can name, in braces: columns, and what is in them (`messages[0].content`);
    the first 50."""
    rows: list[dict[str, str]]
    """The first two rows: by column, its value as text, or as JSON; the first 200 characters of it."""
    reading: str | None = None
    """What of the file is read, and how, where its name does not say."""


class DataPreview(Frozen):
    """preview.json."""

    sources: list[SourcePreview]
    """Of the training rows, one or more; none where `unrecognized` has any."""
    unrecognized: tuple[UnrecognizedSource, ...] = ()
    """Sources whose columns were not recognized, or lack one that the job names: the job has failed."""
    labels: tuple[LabelPlan, ...] = ()
    """Task `classification`: the classes in the order of their numbers, the first twenty."""
    labels_in_all: int = 0
    """How many classes there are, among the rows that *check* looked at, or as the job or the model names them."""
    labels_alike: tuple[tuple[str, ...], ...] = ()
    """Labels that differ in case, blanks, invisible characters or the writing of a number or truth value alone, in
    groups; the first twenty."""
    labels_noticed: tuple[str, ...] = ()
    """What else is odd about labels, and how they are read, a sentence each."""
    validation_noticed: tuple[str, ...] = ()
    """What is odd about validation rows of their own, a sentence each."""
    model_noticed: tuple[str, ...] = ()
    """What of the model is not trained as its config.json says, a sentence each."""
    new_tensors: tuple[str, ...] = ()
    """Tensors that the model named does not have, and that training begins with at random: a classifier's head."""
