"""Rows as the model gets them, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.preview import DataPreview, RowPreview, SourcePreview, SpanPreview, TextPreview
from jobs.text.units import one_line

SHOWN = 300
"""Characters of a text."""
LABELS = 5
"""Named."""
UNTOKENIZED = "characters and tokens: once the job is prepared, `longhaul preview ID` (a new tokenizer is made then)"


def print_preview(preview: DataPreview, console: Console) -> None:
    """What the rows were read as, then input and target of each."""
    grid = Table.grid(padding=(0, 2))
    for source in preview.sources:
        if len(preview.sources) > 1:
            often = "" if source.weight == 1 else f" (weight {source.weight:g})"
            grid.add_row(Text("source", style="dim"), "", Text(one_line(source.name) + often, style="bold"))
        grid.add_row(Text("rows", style="dim"), "", Text(one_line(templates(source))))
        if source.reading:
            grid.add_row(Text("from", style="dim"), "", Text(one_line(source.reading)))
        if source.rows_with_tools:
            unused = f"the column tools of {source.rows_with_tools:,} rows is not used: the chat template gets no tools"
            grid.add_row("", "", Text(unused, style="yellow"))
        if source.lost_layout:
            grid.add_row("", "", Text(source.lost_layout, style="yellow"))
        if source.companions.text:
            grid.add_row("", "", Text(one_line(source.companions.text)))
        for left_out in source.left_out_texts:
            grid.add_row("", "", Text(one_line(left_out), style="yellow"))
        for column in source.unread:
            grid.add_row("", "", Text(one_line(column.text), style="yellow"))
        if not source.tokenized:
            grid.add_row("", "", Text(UNTOKENIZED, style="dim"))
        for row in source.rows:
            title = Text(f"row {row.number:,}", style="dim")
            if row.spans:
                for spans in row.earlier_examples:
                    grid.add_row(title, Text("learned", style="dim"), _learned(spans))
                    title = Text("and", style="dim")
                grid.add_row(title, Text("learned", style="dim"), _learned(row.spans).append_text(_taken(row)))
                continue
            for side, text in (("input", row.input), ("and", row.second), ("target", row.target)):
                if text is not None:
                    limit = f"data.max_{'target' if side == 'target' else 'input'}_tokens"
                    grid.add_row(title, Text(side, style="dim"), _shown(text, limit))
                    title = Text()
            if row.rewritten:
                grid.add_row("", "", Text(f"rewritten: {_characters(row.rewritten)}", style="yellow"))
    for name, sentences in (("validation", preview.validation_noticed), ("model", preview.model_noticed)):
        for noticed in sentences:
            grid.add_row(Text(name, style="dim"), "", Text(one_line(noticed), style="yellow"))
    for unread in preview.unrecognized:
        if unread.reading:
            grid.add_row(Text("from", style="dim"), "", Text(one_line(unread.reading)))
        grid.add_row(Text("columns", style="dim"), "", Text(one_line(f"of {unread.name}: {', '.join(unread.columns)}")))
        for raw in unread.rows:
            values = "; ".join(f"{name}: {value}" for name, value in raw.items())
            grid.add_row(Text("row", style="dim"), "", Text(one_line(values)[:SHOWN]))
    for name, what in _of_labels(preview):
        grid.add_row(Text(name, style="dim"), "", what)
    console.print(grid)


def _of_labels(preview: DataPreview) -> Iterator[tuple[str, Text]]:
    """Of a classifier, its labels and what is new of it."""
    if preview.labels:
        counts = [(label.name, f"{label.rows:,} {'row' if label.rows == 1 else 'rows'}") for label in preview.labels]
        named = [f"{one_line(name)} ({rows})" for name, rows in counts[:LABELS]]
        more = ", …" if preview.labels_in_all > len(named) else ""
        yield "labels", Text(f"{preview.labels_in_all:,}: {', '.join(named)}{more}")
    for group in preview.labels_alike:
        yield "", Text(f"look alike, and are learned apart: {', '.join(map(repr, group))}", style="yellow")
    for noticed in preview.labels_noticed:
        yield "", Text(one_line(noticed), style="yellow")
    if preview.new_tensors:
        yield "new", Text(f"begin at random, for the model has none: {', '.join(map(one_line, preview.new_tensors))}")


def templates(source: SourcePreview) -> str:
    """What a row becomes, and by which format."""
    arrow = source.target if source.input is None else f"{source.input} → {source.target}"
    return f"read as {source.read_as}: {arrow}" if source.read_as else arrow


def _learned(spans: Sequence[SpanPreview]) -> Text:
    """An example as one text, what is learned of it in green between brackets (which need no colour)."""
    shown, left = Text(), SHOWN
    for span in spans:
        text = one_line(span.text[:left])
        shown.append(f"⟦{text}⟧" if span.learned else text, style="green" if span.learned else "")
        left -= len(text)
        if left <= 0:
            shown.append("…")
            break
    return shown


def _taken(row: RowPreview) -> Text:
    """How many tokens all examples of a row have, and what is lost of them."""
    shown = Text()
    if row.input.tokens is not None:
        shown.append(f"  ({row.input.tokens:,} tokens, {row.target.tokens or 0:,} of them learned)", style="dim")
    cut = (row.input.cut_characters or 0) + (row.target.cut_characters or 0)
    if cut:
        shown.append(f"  its last {cut:,} characters are cut off (data.max_tokens)", style="yellow")
    if row.input.unknown:
        shown.append(f"  unknown to the tokenizer: {_characters(row.input.unknown)}", style="yellow")
    return shown


def _shown(text: TextPreview, limit: str) -> Text:
    """The beginning of a text, what it takes, and what is lost of it."""
    rest = "…" if text.characters > SHOWN else ""
    shown = Text(one_line(text.text[:SHOWN]) + rest)
    if text.tokens is not None:
        shown.append(f"  ({text.tokens:,} tokens)", style="dim")
    if text.cut_characters:
        shown.append(f"  its last {text.cut_characters:,} characters are cut off ({limit})", style="yellow")
    if text.unknown:
        shown.append(f"  unknown to the tokenizer: {_characters(text.unknown)}", style="yellow")
    return shown


def _characters(counts: Mapping[str, int]) -> str:
    """Each character, and how often it occurs where that is more than once."""
    times = {each: f" x {count}" if count > 1 else "" for each, count in counts.items()}
    return ", ".join(f"{one_line(each)!r}{often}" for each, often in times.items())
