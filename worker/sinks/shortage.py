"""Memory that ran out, in the words of every sink."""

from __future__ import annotations

from jobs.events import OomRecovered
from jobs.text.units import bytes_by_name, format_duration
from worker.sinks.wording import SHORTAGES


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
