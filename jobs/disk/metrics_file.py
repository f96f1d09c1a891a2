"""metrics.jsonl as a file."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from jobs.disk.files import read_regular, regular, whole_lines, write_atomically
from jobs.metrics import MetricRow

log = logging.getLogger("longhaul.metrics")


def parse_row(line: bytes, file: Path) -> MetricRow | None:
    """The row in a line of `file`; None, with a warning in the log, where the line is damaged: readers pass it over."""
    try:
        return MetricRow.model_validate_json(line)
    except ValidationError as error:
        log.warning("%s has a line that is no row of metrics: %s", file, error.errors()[0]["msg"])
        return None


def read_metrics(file: Path) -> list[MetricRow]:
    """The rows, in order of step; of two for a step the later one. None where there is no file."""
    try:
        lines = whole_lines(read_regular(file))
    except FileNotFoundError:
        return []
    by_step = {row.step: row for line in lines if (row := parse_row(line, file)) is not None}
    return [by_step[step] for step in sorted(by_step)]


def last_metrics(file: Path, reach: int = 65_536) -> MetricRow | None:
    """The last row, looked for in the last `reach` bytes. Raises OSError."""
    with open(file, "rb", opener=regular) as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - reach))
        lines = whole_lines(handle.read())
    return next((row for line in reversed(lines) if (row := parse_row(line, file)) is not None), None)


def truncate_metrics(file: Path, step: int) -> None:
    """Remove the rows after `step`, which the attempt that begins there writes again, and damaged lines.

    The file is always replaced: a reader gets the old rows or the new ones, never a mixture, and a row that an attempt
    which is over was writing goes into the old file. Where the disk has no room for that the rows stay, and the later
    row of a step counts.
    """
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return
    kept: dict[int, bytes] = {}
    for line in whole_lines(raw):
        row = parse_row(line, file)
        if row is not None and row.step <= step:
            kept[row.step] = line + b"\n"
    try:
        write_atomically(file, b"".join(kept[each] for each in sorted(kept)))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        log.error("%s keeps its rows after step %d: there is no room on the disk to replace it", file, step)
