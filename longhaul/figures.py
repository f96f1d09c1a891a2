"""What people see in a terminal: figures (durations, sizes, losses, times), progress bars, no control characters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.segment import Segment

from jobs.answers import Job
from jobs.text.units import format_bytes, format_duration, format_figure, printable

# -- terminal ----------------------------------------------------------------------------------------------------------
# The terminal, on which no text from elsewhere can do anything but be read.


class Terminal(Console):
    """Rich's console: colours and layout are ours alone, whatever stands in a text."""

    def __init__(self, **settings: Any) -> None:
        """`[red]` and `:smile:` in a text are text."""
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is shown comes through here. What is taken out has no width, so no table shifts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


# -- figures -----------------------------------------------------------------------------------------------------------


def duration(seconds: float | None) -> str:
    """Its two largest units; a dash when unknown."""
    return "–" if seconds is None else format_duration(seconds)


def largest_units(durations: Sequence[str]) -> list[str]:
    """Of texts as `duration` makes them, with the first unit alone."""
    return [" ".join(each.split()[:2]) for each in durations]


def size(count: float | None) -> str:
    """Bytes; a dash when unknown."""
    return "–" if count is None else format_bytes(count)


def loss(value: float | None) -> str:
    """Four places; a dash when unknown."""
    return "–" if value is None else format_figure(value)


def clock(at: float) -> str:
    """Local time; with the day when it is not today."""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%d %b %H:%M", then)


def memory_needed(job: Job) -> str | None:
    """What a job needs of memory, as planned; None before check, and in jobs of earlier versions."""
    planned = job["plan"].get("memory")
    return planned["text"] if planned else None


def time_needed(job: Job) -> str | None:
    """What a job needs on its GPU, as planned before anything was measured; None when nothing is known of a GPU."""
    planned = job["plan"].get("time")
    return planned["text"] if planned else None


# -- bars --------------------------------------------------------------------------------------------------------------
# A progress bar for transfers; none if the output is not a terminal.


@contextmanager
def bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Tell what it yields (name, bytes done, bytes in all); one line for the file that is on its way."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None, visible=False)  # nothing may be on its way: the rows are there already

        def report(name: str, done: int, size: int) -> None:
            progress.update(task, description=name, completed=done, total=size, visible=True)

        yield report
