"""What memory has taught about micro-batches of one length bucket; kept in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SafeSize:
    """What one bucket may have, in rows of the longest shape."""

    size: int
    """Now."""
    former: int | None = None
    """What it goes back to with the next epoch, where the cause has passed by then."""
    fallback: int | None = None
    """What is known to do, where it has gone back: the next error leads there at once."""
