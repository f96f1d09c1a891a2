"""What there is to know about a prepared dataset: `dataset.json`, and the summary that goes into the job's record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.training.dataset.data import SIDES, Int32, Int64
from worker.training.rows.tally import Tally

_PERCENTILES = (50, 90, 95, 99)
_MOST_IN_SUMMARY = 20
OTHERS = "(others)"
_MOST = 1000
"""Entries of a list, the commonest first: a corpus may have every character there is."""


@dataclass(frozen=True)
class Lengths:
    """How long texts are, in tokens, end-of-sequence included, before they were cut to `limit`."""

    limit: int
    values: Int64
    """Each length that occurs, ascending."""
    counts: Int64
    """Texts of each."""

    @classmethod
    def of(cls, full_lengths: Int32, limit: int) -> Lengths:
        """Of [texts] lengths."""
        values, counts = np.unique(full_lengths, return_counts=True)
        return cls(limit, values.astype(np.int64), counts)

    def percentiles(self) -> dict[str, dict[str, int]]:
        """`before` and `after` cutting: p50, p90, p95, p99 (that share of the texts is no longer), max."""
        reached = np.cumsum(self.counts)
        places = [np.searchsorted(reached, np.ceil(share * reached[-1] / 100)) for share in _PERCENTILES]
        names = [*(f"p{share}" for share in _PERCENTILES), "max"]
        before = [int(self.values[place]) for place in (*places, -1)]
        return {
            "before": dict(zip(names, before, strict=True)),
            "after": {name: min(value, self.limit) for name, value in zip(names, before, strict=True)},
        }


def summary(
    tallies: Sequence[Tally], lengths: Mapping[str, Lengths], rows: Mapping[str, int], shared_inputs: int
) -> dict[str, Any]:
    """A few KB at most. `tallies` are of the sources, `rows` of train and validation."""
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return {
        "rows_read": total.read,
        "kept": total.kept,
        "set_aside": commonest(total.set_aside, _MOST_IN_SUMMARY),
        "duplicates": total.duplicates,
        "train_rows": rows["train"],
        "validation_rows": rows["validation"],
        "validation_inputs_in_training": shared_inputs,
        **{f"truncated_{side}s": total.truncated[side] for side in SIDES},
        **{f"{side}_tokens": total.tokens[side] for side in SIDES},
        "unknown_tokens": total.unknown_tokens,
        "unknown_token_rate": round(total.unknown_tokens / max(1, total.tokens.total()), 8),
        "unknown_characters": commonest(total.unknown, _MOST_IN_SUMMARY),
        "normalised": commonest(total.normalised, _MOST_IN_SUMMARY),
        "noticed": commonest(total.noticed, _MOST_IN_SUMMARY),
        "lengths": {side: {"limit": lengths[side].limit, **lengths[side].percentiles()} for side in SIDES},
    }


def full_report(names: Sequence[str], tallies: Sequence[Tally], short: Mapping[str, Any]) -> dict[str, Any]:
    """The summary, then what is known of each source by itself, in full."""
    return {
        **short,
        "sources": [
            {
                "name": name,
                "rows_read": tally.read,
                "kept": tally.kept,
                "duplicates": tally.duplicates,
                "set_aside": {
                    reason: {"rows": count, "first": tally.first.get(reason, [])}
                    for reason, count in commonest(tally.set_aside, _MOST).items()
                },
                "unknown_characters": commonest(tally.unknown, _MOST),
                "normalised": commonest(tally.normalised, _MOST),
                "noticed": commonest(tally.noticed, _MOST),
            }
            for name, tally in zip(names, tallies, strict=True)
        ],
    }


def commonest(counts: Counter[str], most: int) -> dict[str, int]:
    """The `most` commonest, the commonest first, and how often all `OTHERS` occur together.

    The same counts in whatever order give the same.
    """
    ordered = sorted((+counts).items(), key=lambda entry: (-entry[1], entry[0]))
    rest = sum(count for _, count in ordered[most:])
    return dict(ordered[:most]) | ({OTHERS: rest} if rest else {})
