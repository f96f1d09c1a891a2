"""How our processes write their log: lines for people, or a JSON object a line (LONGHAUL_LOG=json); without secrets.

What a line is about, the job and the request, comes along by itself: `about` and `REQUEST_ID` mark what runs inside
them, pool threads of the service included.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

from jobs.process.secrets import redact
from jobs.text.units import printable

FORMATS = ("text", "json")
JOB: ContextVar[str | None] = ContextVar("job", default=None)
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) (.*)")
_FATAL = ("Fatal Python error: ", "terminate called after ")
"""What Python and C++ say of an end that no traceback explains."""
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


def configure(form: str) -> None:
    """Write everything from level INFO on to stderr, as `text` or `json`. Called once, when a process starts.

    uvicorn's and rq's loggers, too: neither sets up its own where the root has a handler.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def log_format(given: str) -> str:
    """The value of LONGHAUL_LOG. Raises ValueError."""
    if given not in FORMATS:
        raise ValueError(f"LONGHAUL_LOG={given!r} is no format of the log: it is {' or '.join(FORMATS)}")
    return given


def is_logged(line: str) -> bool:
    """Whether a line of text is one of a logger's."""
    return _LINE.match(line) is not None


def last_error(text: str) -> str:
    """The error that a log (as text) ends with: a line of level ERROR, or the last line of a traceback.

    Empty if the last line is not an error: then it does not say what ended the process.
    """
    found, inside = "", False
    for line in text.splitlines():
        if logged := _LINE.match(line):
            found, inside = logged[2] if logged[1] in ("ERROR", "CRITICAL") else "", False
        elif line.startswith("Traceback (most recent call last)"):
            inside = True
        elif line.startswith(_FATAL) or (inside and line and not line[0].isspace()):
            found, inside = line, False
    return found


@contextmanager
def about(job: str) -> Iterator[None]:
    """Lines written inside are about this job."""
    before = JOB.set(job)
    try:
        yield
    finally:
        JOB.reset(before)


class TextLines(logging.Formatter):
    """`<time> <level> <logger> <message>`, and tracebacks on lines of their own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Without secrets and terminal escapes."""
        return redact(printable(super().format(record)))


class JsonLines(logging.Formatter):
    """One object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`; where there is one `job`, `request_id`,
    `exception`; and what the call gave as `extra={"fields": {…}}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """ASCII alone: a line stays one line whatever is in it. Without secrets."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "job": JOB.get(),
            "request_id": REQUEST_ID.get(),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
            "stack": record.stack_info,
            **getattr(record, "fields", {}),
        }
        return json.dumps({name: _clean(value) for name, value in line.items() if value is not None}, default=str)


def _clean(value: object) -> object:
    """Without secrets."""
    if isinstance(value, dict):
        return {name: _clean(each) for name, each in value.items()}
    return redact(value) if isinstance(value, str) else value
