"""The terminal, on which no text from elsewhere can do anything but be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from jobs.text.printable import printable


class Terminal(Console):
    """Rich's console: colours and layout are ours alone, whatever stands in a text."""

    def __init__(self, **settings: Any) -> None:
        """`[red]` and `:smile:` in a text are text."""
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything that is shown comes through here. What is taken out has no width, so no table shifts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
