"""What was found in the rows of a job: in short in `job.prepared`, in full in `dataset.json` of its run directory."""

from __future__ import annotations

from pydantic.json_schema import SkipJsonSchema

from jobs.companions import LEFT_OUT
from jobs.frozen import Frozen, left_out
from jobs.text.units import format_number, format_share

_LABELS = 5
"""Named."""
_MANY = 0.03
"""Of all texts: so many that the tokenizer does not know in full are said."""


class Percentiles(Frozen):
    """Of lengths in tokens, end-of-sequence included: that share of the texts is no longer."""

    p50: int
    """50 %."""
    p90: int
    """90 %."""
    p95: int
    """95 %."""
    p99: int
    """99 %."""
    max: int
    """All of them."""


class LengthSummary(Frozen):
    """How long the texts of one side are."""

    limit: int
    """Tokens at most: longer texts are cut."""
    before: Percentiles
    """Before they were cut."""
    after: Percentiles
    """As they are trained."""


class SideLengths(Frozen):
    """How long texts are."""

    input: LengthSummary
    """Of inputs."""
    target: LengthSummary
    """Of targets."""


class ContradictoryText(Frozen):
    """A text that rows have with different labels."""

    text: str
    """As the model reads it; its first 200 characters."""
    labels: list[str]
    """Those of its rows; of several labels a row, the labels of each."""


class ClassSummary(Frozen):
    """Task `classification`: the labels of all rows."""

    classes: dict[str, int]
    """Rows that have a label, by label; the commonest twenty (in `dataset.json` the commonest thousand), and
    `(others)`."""
    largest_share: float
    """Share of the rows that have the commonest label."""
    without_label: int
    """Rows that have none (`task.multi_label`)."""
    validation_only: list[str]
    """Labels of held-out rows that no training row has; the first twenty."""
    labels_alike: tuple[tuple[str, ...], ...] = ()
    """Labels that differ in case, blanks, invisible characters or the writing of a number or truth value alone, in
    groups; the first twenty."""
    labels_noticed: tuple[str, ...] = ()
    """What else is odd about labels, and how they are read, a sentence each."""
    contradictory_texts: int
    """Texts that occur more than once, with different labels."""
    contradictory_example: ContradictoryText | None
    """The first of them; null: there is none."""


class ScoreSummary(Frozen):
    """Task `regression`: the scores of all rows."""

    low: float
    """The lowest."""
    high: float
    """The highest."""
    mean: float
    """Of all."""
    deviation: float
    """Standard deviation: its square is the mean squared error of always answering the mean."""

    @property
    def text(self) -> str:
        """For people."""
        low, high, mean, deviation = map(format_number, (self.low, self.high, self.mean, self.deviation))
        return (
            f"scores from {low} to {high}, mean {mean}, standard deviation {deviation}: always answering the mean has "
            f"a mean squared error of {format_number(self.deviation**2)}"
        )


class DatasetSummary(Frozen):
    """All rows. Counts by reason or character have the commonest twenty, and `(others)` for the rest."""

    rows_read: int
    """Rows, not blank lines."""
    kept: int
    """Those that are used."""
    examples: int = 0
    """What they have become: as many, or more where a chat template writes earlier turns otherwise than the last, so
    that each reply of a chat needs a text of its own. 0 in events of earlier versions."""
    rejected: dict[str, int]
    """Rejected rows, by reason; `left out: …` where the row itself says that it is not to be learned."""
    duplicates: int
    """Rows equal to an earlier one: rejected, too."""
    train_rows: int
    """Examples to learn from; but for chats as in `examples`, these are rows."""
    validation_rows: int
    """Examples held out; all of a row are."""
    validation_asked: float | str
    """`data.validation`, as in the job."""
    validation_share: float
    """Share of the rows that is held out."""
    validation_inputs_in_training: int
    """Held-out rows whose input is also one to learn from."""
    truncated_inputs: int
    """Inputs that were cut to `data.max_input_tokens`."""
    truncated_targets: int
    """Targets that were cut to `data.max_target_tokens`."""
    input_tokens: int
    """Of all inputs."""
    target_tokens: int
    """Of all targets."""
    unknown_inputs: int = 0
    """Inputs with characters that the tokenizer does not know; 0 in events of earlier versions, as is the next."""
    unknown_targets: int = 0
    """Targets with such characters."""
    unknown_tokens: int
    """Tokens that the tokenizer does not know."""
    unknown_token_rate: float
    """Their share of all tokens."""
    unknown_characters: dict[str, int]
    """The characters behind those."""
    normalized: dict[str, int]
    """Characters that were rewritten."""
    noticed: dict[str, int]
    """Rows with something odd that was left as it is."""
    rewritten: dict[str, int]
    """Texts that are not as they stood in the row, by what was done."""
    lengths: SideLengths
    """In tokens."""
    labels: ClassSummary | SkipJsonSchema[None] = left_out()
    """Task `classification`: what labels the rows have; left out for other tasks."""
    scores: ScoreSummary | SkipJsonSchema[None] = left_out()
    """Task `regression`: what scores the rows have; left out for other tasks."""

    @property
    def left_out(self) -> int:
        """Rows that themselves say that they are not to be learned, among the rejected ones."""
        return sum(rows for reason, rows in self.rejected.items() if reason.startswith(LEFT_OUT))


class PreparedSummary(DatasetSummary):
    """All rows, and where they are."""

    prepared: str
    """Absolute path of the prepared dataset."""

    def text(self, rows_per_epoch: int | None, *, trains: bool) -> str:
        """What was found, each part with a comma behind it. `rows_per_epoch`: where that is another number."""
        an_epoch = f" ({rows_per_epoch:,} an epoch)" if rows_per_epoch else ""
        rows = "examples" if self.examples > self.kept else "rows"
        parts = [f"{self.train_rows:,} {'training ' if trains else ''}{rows}{an_epoch}"]
        if self.validation_rows:
            asked, share = self.validation_asked, self.validation_share
            note = ""
            if isinstance(asked, float) and not 0.5 <= share / asked <= 1.5:
                note = f" ({format_share(share)} instead of {format_share(asked)})"
            parts.append(f"{self.validation_rows:,} validation {rows}{note}")
        if self.examples > self.kept:
            parts.append(f"made of {self.kept:,} rows (the chat template rewrites earlier turns)")
        if rejected := sum(self.rejected.values()) - self.left_out:
            parts.append(f"{rejected:,} rejected")
        if self.left_out:
            parts.append(f"{self.left_out:,} left out as the file says")
        if self.duplicates:
            parts.append(f"{self.duplicates:,} duplicates left out")
        if cut := self.truncated_inputs + self.truncated_targets:
            parts.append(f"{cut:,} texts truncated")
        if labels := self.labels:
            if labels.validation_only:
                shown = ", ".join(labels.validation_only[:_LABELS])
                parts.append(f"labels that only validation rows have: {shown}")
            if labels.labels_alike:
                shown = "; ".join(" and ".join(map(repr, group)) for group in labels.labels_alike[:_LABELS])
                parts.append(f"labels that look alike: {shown}")
            parts += labels.labels_noticed
            if labels.contradictory_texts:
                parts.append(f"{labels.contradictory_texts:,} texts with different labels")
        if self.scores:
            parts.append(self.scores.text)
        many = _MANY * self.kept
        for unknown, side in (self.unknown_inputs, "inputs"), (self.unknown_targets, "targets"):
            if unknown > many:
                parts.append(f"{unknown:,} {side} have characters that the tokenizer does not know")
        if (rewritten := self.rewritten.get("characters rewritten", 0)) > 2 * many:
            parts.append(f"{rewritten:,} texts have characters that were rewritten")
        return "".join(f"{part}, " for part in parts)


class RejectedRows(Frozen):
    """Rows rejected for one reason."""

    rows: int
    """How many."""
    first: list[int]
    """Numbers of the first few."""


class Rewriting(Frozen):
    """One text before and after it was rewritten."""

    before: str
    """As it stood in the row."""
    after: str
    """As it is trained."""


class RewrittenTexts(Frozen):
    """Texts rewritten in one way."""

    texts: int
    """How many."""
    example: Rewriting
    """The first of them."""


class SourceReport(Frozen):
    """The rows of one source. Counts have the commonest thousand, and `(others)` for the rest."""

    name: str
    """As in the job."""
    rows_read: int
    """Rows, not blank lines."""
    kept: int
    """Those that are used."""
    duplicates: int
    """Rows equal to an earlier one: rejected, too."""
    rejected: dict[str, RejectedRows]
    """Rejected rows, by reason."""
    unknown_characters: dict[str, int]
    """Characters that the tokenizer does not know."""
    normalized: dict[str, int]
    """Characters that were rewritten."""
    noticed: dict[str, int]
    """Rows with something odd that was left as it is."""
    rewritten: dict[str, RewrittenTexts]
    """Texts that are not as they stood in the row, by what was done."""


class DatasetReport(DatasetSummary):
    """dataset.json."""

    sources: list[SourceReport]
    """Training rows, then validation rows if they have a source of their own."""
