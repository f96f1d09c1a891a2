"""Numbers and texts as people read them."""

from __future__ import annotations

from jobs.events import OomRecovered
from jobs.text.units import bytes_by_name, format_duration, format_figure

BAR_CELLS = 20

SHORTAGES = {
    "fragmentation": "Free memory was too fragmented",
    "other_processes": "Other processes hold memory of the GPU",
    "exhausted": "The step needs more memory than there is",
}
"""Why memory ran out."""


def code(text: str) -> str:
    """A block of code; a fence within the text cannot end it."""
    return "```\n" + text.replace("```", "'''").strip() + "\n```"


def plain(text: str) -> str:
    """Text of a data set, so that Discord shows its markup characters as they are."""
    return "".join("\\" + character if character in "\\*_~`|<>#[]" else character for character in text)


def sentence(text: str) -> str:
    """With a capital letter, as a line of its own begins."""
    return text[:1].upper() + text[1:]


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


# -- shortage ----------------------------------------------------------------------------------------------------------
# Memory that ran out, in the words of every sink.


def shortage(fact: OomRecovered) -> str:
    """All of it but the message, in one line."""
    parts = [
        *([SHORTAGES[fact.cause]] if fact.cause else []),
        f"micro-batch {micro_batches(fact)}" + (f" ({fact.bucket})" if fact.bucket else ""),
        *([sizes] if (sizes := shortage_sizes(fact)) else []),
        f"{format_duration(fact.milliseconds_lost / 1000)} lost",
    ]
    return "; ".join(parts)


def micro_batches(fact: OomRecovered) -> str:
    """Before and after, in rows of the longest shape."""
    if fact.micro_batch_after == fact.micro_batch_before:
        return f"{fact.micro_batch_before} rows, as before"
    return f"{fact.micro_batch_before} → {fact.micro_batch_after} rows"


def shortage_sizes(fact: OomRecovered) -> str:
    """What was asked for, and who had the rest; empty where nothing of it is known."""
    sizes = {
        "requested": fact.requested_bytes,
        "allocated": fact.allocated_bytes,
        "reserved": fact.reserved_bytes,
        "held by other processes": fact.other_processes_bytes,
    }
    return " · ".join(bytes_by_name(sizes))
