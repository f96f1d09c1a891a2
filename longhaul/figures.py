"""Figures for people: durations, sizes, losses, times."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jobs.text.units import format_bytes, format_duration, format_figure
from longhaul.answers import JobDict


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


def memory_needed(job: JobDict) -> str | None:
    """What a job needs of memory, as planned; None before check, and in jobs of earlier versions."""
    planned = job["plan"].get("memory")
    return planned["text"] if planned else None


def time_needed(job: JobDict) -> str | None:
    """What a job needs on its GPU, as planned before anything was measured; None when nothing is known of a GPU."""
    planned = job["plan"].get("time")
    return planned["text"] if planned else None
