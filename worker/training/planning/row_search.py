"""The most rows whose predicted peak is within a limit: which number to predict next, so that few are needed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from worker.training.planning.prediction import Prediction


def next_rows(
    fits: Mapping[int, Prediction], too_many: tuple[int, int] | None, limit_bytes: int, cap: int
) -> int | None:
    """How many rows to trace next: more than are known to fit, fewer than are known not to; None if that is decided.

    `too_many`: rows, and their peak.
    """
    best = max(fits)
    if best >= cap or (too_many is not None and too_many[0] == best + 1):
        return None
    room = limit_bytes - fits[best].peak
    fewer = max((rows for rows in fits if rows < best), default=None)
    # Any second point will do; all rows at once where they fit even if everything grew with them.
    guess: float = cap - best if fits[best].peak * cap <= best * limit_bytes else 8 - best
    if fewer is not None:
        less, more = fits[fewer], fits[best]
        # One row more needs its activations at least: not worth a trace where these alone are clearly too much.
        both = (
            more.parts["activations"] / best,
            (more.parts["activations"] - less.parts["activations"]) / (best - fewer),
        )
        if room < 0.9 * min(both):
            return None
        slope = (more.peak - less.peak) / (best - fewer)
        guess = room / slope if slope > 0 else math.inf
    if too_many is not None:
        guess = room * (too_many[0] - best) / (too_many[1] - fits[best].peak)
    most = cap if too_many is None else too_many[0] - 1
    return int(min(most, best + max(1, guess)))
