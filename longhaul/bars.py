"""A progress bar for transfers; none if the output is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


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
