"""Numbers and texts as people read them."""

from __future__ import annotations

from jobs.text.units import format_figure
from jobs.trainer_facts import OomRecovered

BAR_CELLS = 20


def code(text: str) -> str:
    """A block of code; a fence within the text cannot end it."""
    return "```\n" + text.replace("```", "'''").strip() + "\n```"


def plain(text: str) -> str:
    """Text of a data set, so that Discord shows its markup characters as they are."""
    return "".join("\\" + character if character in "\\*_~`|<>#[]" else character for character in text)


def change(first: float | None, last: float | None) -> str:
    """From the first loss to the last."""
    if last is None:
        return "not measured"
    if first is None or first == last:
        return format_figure(last)
    return f"{format_figure(first)} → {format_figure(last)}"


def bar(fraction: float) -> str:
    """A text progress bar."""
    full = int(min(1.0, max(0.0, fraction)) * BAR_CELLS)
    return "█" * full + "░" * (BAR_CELLS - full)


def shortage(fact: OomRecovered) -> str:
    """Memory that ran out, all but the message, in one line."""
    details = fact.details
    bucket = f" ({details['Length bucket']})" if "Length bucket" in details else ""
    parts = [details.get("Cause"), f"micro-batch {details['Micro-batch']}{bucket}", details.get("Memory")]
    return "; ".join(filter(None, [*parts, f"{details['Time lost']} lost"]))
