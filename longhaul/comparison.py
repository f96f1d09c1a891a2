"""`longhaul compare`: what differs between jobs, the cause first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from jobs.comparison.answer import Comparison, Difference, SeedRuns
from jobs.text.units import format_bytes, format_duration
from longhaul.figures import loss
from longhaul.tables import Column, Row, print_facts, print_table

LETTERS = "ABCDEFGHIJ"
_WITH_COLUMNS = 4
"""So many jobs have a column each; of more, values that are alike stand together."""
_FOLDED = 12
_TITLES = {"gpu": "GPU"}


def print_comparison(found: Comparison, console: Console) -> None:
    """The jobs, why the memory of one did not suffice, what differs by group, and what is not listed."""
    letters = LETTERS[: len(found.jobs)]
    print_facts([(letter, _job(found, place)) for place, letter in enumerate(letters)], console)
    for cause in found.causes:
        console.print("\n", Text(cause.text, style="bold"), sep="")
    tables = [(_TITLES.get(group.name, group.name), group.differences) for group in found.groups]
    for title, differences in [*tables, ("labels (they change nothing)", found.labels)]:
        if differences:
            console.print(f"\n{title}", style="italic")
            _print_differences(differences, letters, console)
    if found.shared:
        console.print("\nwhat several cost together", style="italic")
        shared = [(" + ".join(each.keys), _signed(each.bytes, letters, format_bytes)) for each in found.shared]
        print_facts(shared, console)
    console.print()
    ids = [job.id for job in found.jobs]
    rest: list[tuple[str, str | Text]] = [("equal", f"{found.equal} other settings")]
    for each in found.seeds:
        rest.append(("seeds", f"{', '.join(letters[ids.index(job)] for job in each.jobs)}: {_final_loss(each)}"))
    print_facts(rest, console)


def _job(found: Comparison, place: int) -> Text:
    job = found.jobs[place]
    told = Text(f"{job.name} · {job.id} · ").append(job.status, style="red" if job.status == "failed" else "")
    return told if job.error is None else told.append(f" [{job.error.code}]")


def _final_loss(runs: SeedRuns) -> str:
    if runs.mean is None:
        return "no final loss yet"
    spread = "" if runs.standard_deviation is None else f" ± {loss(runs.standard_deviation)}"
    return f"final loss {loss(runs.mean)}{spread} (n = {runs.n})"


def _print_differences(differences: Sequence[Difference], letters: str, console: Console) -> None:
    if len(letters) > _WITH_COLUMNS:
        print_facts([(each.key, Text(_together(each, letters))) for each in differences], console)
        return
    columns = [Column("key", folds=_FOLDED), *(Column(letter, folds=_FOLDED) for letter in letters)]
    if any(each.bytes or each.seconds for each in differences):
        columns.append(Column("costs"))
    rows: list[Row] = [
        {
            "key": each.key,
            **{letter: Text(each.text(place)) for place, letter in enumerate(letters)},
            "costs": _costs(each, letters),
        }
        for each in differences
    ]
    print_table(columns, rows, console)


def _together(difference: Difference, letters: str) -> str:
    """`2,048 (A, C) · 512 (B)  B −1.7 GiB`."""
    by_value: defaultdict[str, list[str]] = defaultdict(list)
    for place, letter in enumerate(letters):
        by_value[difference.text(place)].append(letter)
    values = " · ".join(f"{value} ({', '.join(having)})" for value, having in by_value.items())
    return f"{values}  {_costs(difference, letters)}".rstrip()


def _costs(difference: Difference, letters: str) -> str:
    """What it costs the jobs beside the reference."""
    told = [
        _signed(difference.bytes or [], letters, format_bytes),
        _signed(difference.seconds or [], letters, format_duration),
    ]
    return ", ".join(filter(None, told))


def _signed(costs: Sequence[float | None], letters: str, worded: Callable[[float], str]) -> str:
    """`B +1.7 GiB, C −300 MiB`; without letters where two jobs are compared."""
    told = [(letter, cost) for letter, cost in zip(letters, costs, strict=False) if cost]
    return ", ".join(
        f"{f'{letter} ' if len(letters) > 2 else ''}{'+' if cost > 0 else '−'}{worded(abs(cost))}"
        for letter, cost in told
    )
