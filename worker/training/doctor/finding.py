"""What one check has found: a line for people, figures for programs."""

from __future__ import annotations

import math
import re
from typing import Literal

from pydantic import Field

from jobs.frozen import Frozen

Status = Literal["PASS", "WARN", "FAIL", "SKIP"]
_FOLDERS = re.compile(r"(?<![:/\w])/(?:[^\s'\",:;()\[\]/]+/)+")
"""Of a path in an error: a page for others must not name a person's folders."""


class Finding(Frozen):
    """The result of one check."""

    check: str
    """Its name, as in `groups.py`."""
    status: Status
    """`SKIP`: it does not apply here, or there was no time for it."""
    figure: str
    """What was measured; of a skipped check the reason."""
    limit: str | None = None
    """What is asked for."""
    hint: str | None = None
    """What to do."""
    values: dict[str, float] = Field({})
    """The figures for programs, in SI units and bytes."""
    model: str | None = None
    """Which one was loaded, as `--model` names it."""

    @property
    def line(self) -> str:
        """For people."""
        limit = f" (limit: {self.limit})" if self.limit and self.status != "SKIP" else ""
        hint = f"; {self.hint}" if self.hint and self.status in ("WARN", "FAIL") else ""
        return f"{self.status}  {self.check}: {self.figure}{limit}{hint}"


def judge(
    check: str,
    figure: str,
    *,
    limit: str | None = None,
    fail: bool = False,
    warn: bool = False,
    hint: str | None = None,
    **values: float,
) -> Finding:
    """FAIL, else WARN, else PASS."""
    status: Status = "FAIL" if fail else "WARN" if warn else "PASS"
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Finding(check=check, status=status, figure=figure, limit=limit, hint=hint, values=finite)


def skip(check: str, reason: str) -> Finding:
    """A check that was not made."""
    return Finding(check=check, status="SKIP", figure=reason)


def failed(check: str, error: BaseException) -> Finding:
    """A check that raised."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return Finding(
        check=check,
        status="FAIL",
        figure=_FOLDERS.sub("…/", lines[0])[:500],
        hint="report it, with the page of --report",
    )
