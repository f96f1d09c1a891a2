"""Numbers and texts as people read them."""

from __future__ import annotations

BAR_CELLS = 20


def code(text: str) -> str:
    """A block of code; a fence within the text cannot end it."""
    return "```\n" + text.replace("```", "'''").strip() + "\n```"


def plain(text: str) -> str:
    """Text of a data set, so that Discord shows its markup characters as they are."""
    return "".join("\\" + character if character in "\\*_~`|>#[]" else character for character in text)


def change(first: float | None, last: float | None) -> str:
    """From the first loss to the last."""
    if last is None:
        return "not measured"
    if first is None or first == last:
        return f"{last:.4g}"
    return f"{first:.4g} → {last:.4g}" + (f" ({last / first - 1:+.0%})" if first > 0 else "")


def bar(fraction: float) -> str:
    """A text progress bar."""
    full = int(min(1.0, max(0.0, fraction)) * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)


def gibibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """The two largest units, e.g. `3 h 20 min`."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole % 86400 // 3600, whole % 3600 // 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {whole % 60} s"
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
