"""What is wrong with a job, collected, so that its user hears of all of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jobs.errors import BadData, Rejected, StageError


class Mistakes:
    """Errors that were kept back, in order."""

    def __init__(self) -> None:
        self._errors: list[StageError] = []

    @contextmanager
    def kept_back(self) -> Iterator[None]:
        """Keep what is raised here, and go on after it."""
        try:
            yield
        except (BadData, Rejected) as error:
            self.add(error)

    def add(self, error: StageError) -> None:
        """Keep an error; of one that is made of several, each. What was said already is not said again."""
        known = {str(one) for one in self._errors}
        self._errors += [one for one in error.parts if str(one) not in known]

    def raise_all(self) -> None:
        """Raise the only error as it is; of several, one of the first one's kind that names them all."""
        if not self._errors:
            return
        first = self._errors[0]
        if len(self._errors) == 1:
            raise first
        lines = [f"- {one}" + (f"\n  hint: {one.hint}" if one.hint else "") for one in self._errors]
        together = type(first)("\n".join([f"{len(lines)} errors:", *lines]), code=first.detail_code, param=first.param)
        together.parts = tuple(self._errors)
        raise together
