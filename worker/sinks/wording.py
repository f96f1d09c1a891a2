"""Numbers and texts as people read them."""

from __future__ import annotations

BAR_CELLS = 20

REASONS = {
    "done": "Training is done",
    "interrupted": "Interrupted: the checkpoint is saved",
    "device_busy": "The card is taken",
    "out_of_memory": "Out of memory",
    "oom_in_optimizer": "Out of memory in the optimizer",
    "refused": "Refused",
    "bad_data": "The data cannot be used",
    "non_finite": "Loss or gradient is not finite",
    "disk_full": "The disk is full",
    "crash": "The trainer crashed",
    "silent": "The trainer fell silent and was ended",
    "lost": "The worker was lost",
    "host_out_of_memory": "The machine ran out of memory",
}
"""Why an attempt ended."""

SHORTAGES = {
    "fragmentation": "Free memory was there, in pieces too small",
    "foreign": "Other processes hold memory of the card",
    "exhausted": "The step needs more than there is",
}
"""Why memory ran out."""


def code(text: str) -> str:
    """A block of code; a fence within the text cannot end it."""
    return "```\n" + text.replace("```", "'''").strip() + "\n```"


def plain(text: str) -> str:
    """Text of a data set, so that Discord shows its markup characters as they are."""
    return "".join("\\" + character if character in "\\*_~`|>#[]" else character for character in text)


def sentence(text: str) -> str:
    """With a capital letter, as a line of its own begins."""
    return text[:1].upper() + text[1:]


def count(number: int) -> str:
    """Parameters for people."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


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
