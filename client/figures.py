"""Figures for people: durations, sizes, losses, times."""

from __future__ import annotations

import time
from typing import Any


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `5 d 4 h`; a dash when unknown."""
    if seconds is None:
        return "–"
    whole = max(0, int(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes = (whole + 30) // 60
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def size(count: float | None) -> str:
    """`700 B`, `12 KiB`, `512 MiB`, `28.1 GiB`; a dash when unknown."""
    if count is None:
        return "–"
    if count < 1024**2:
        return f"{count:.0f} B" if count < 1024 else f"{count / 1024:.0f} KiB"
    if count < 1024**3:
        return f"{count / 1024**2:.0f} MiB"
    return f"{count / 1024**3:.1f} GiB"


def loss(value: float | None) -> str:
    """Four places; a dash when unknown."""
    return "–" if value is None else f"{value:.4f}"


def clock(at: float) -> str:
    """Local time; with the day when it is not today."""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%d %b %H:%M", then)


def memory_needed(job: dict[str, Any]) -> str | None:
    """What a job needs of memory, as planned; None before check, and in jobs of earlier versions."""
    planned: dict[str, Any] = job["plan"].get("memory") or {}
    return planned.get("text")


def time_needed(job: dict[str, Any]) -> str | None:
    """What a job needs on its card, as planned before anything was measured; None when nothing is known of a card."""
    planned: dict[str, Any] = job["plan"].get("time") or {}
    return planned.get("text")
