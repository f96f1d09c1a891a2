"""What is said of the labels of all rows: how many have each, which only held-out rows have, where texts contradict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jobs.dataset_report import ClassSummary, ContradictoryText
from worker.training.dataset.data import Int64, Tokens
from worker.training.dataset.report import IN_SUMMARY, commonest
from worker.training.dataset.tokens import TokenizerState
from worker.training.rows.labels import labels_alike
from worker.training.rows.row_filter import UInt64
from worker.training.tasks.classification.labels import SEPARATOR
from worker.training.tasks.classification.pairs import decoded

_SHOWN = 200
"""Characters of a text."""
Side = tuple[Tokens, Int64]
"""The numbers of all rows, and where each row begins and ends."""


@dataclass(frozen=True)
class ClassReport:
    """`labels` by number. The methods are described in `LabelReport`."""

    labels: Sequence[str]
    tokenizer: TokenizerState
    noticed: tuple[str, ...] = ()

    def __call__(
        self, numbers: Mapping[str, Side], split_keys: UInt64, parts: Mapping[str, Int64], most: int
    ) -> ClassSummary:
        targets = numbers["target"]
        of_part = {part: self._counts(targets, rows) for part, rows in parts.items()}
        counts = sum(of_part.values(), Counter[str]())
        rows = sum(len(chosen) for chosen in parts.values())
        lengths = np.diff(targets[1])
        contradictory = list(contradictions(numbers["input"], targets, split_keys))
        example = None
        if contradictory:
            tokens = _of(numbers["input"], contradictory[0][0]).tolist()
            text = "\n".join(decoded(tokens, self.tokenizer.end, self.tokenizer.open().decode))
            labels = [self._names(targets, row) for row in contradictory[0]]
            example = ContradictoryText(text=text.strip()[:_SHOWN], labels=list(dict.fromkeys(labels)))
        return ClassSummary(
            classes=commonest(counts, most),
            largest_share=round(max(counts.values(), default=0) / max(1, rows), 6),
            without_label=sum(int((lengths[chosen] == 0).sum()) for chosen in parts.values()),
            validation_only=[
                label for label in self.labels if of_part["validation"][label] and not of_part["train"][label]
            ][:IN_SUMMARY],
            labels_alike=labels_alike(self.labels),
            labels_noticed=self.noticed,
            contradictory_texts=len(contradictory),
            contradictory_example=example,
        )

    def _counts(self, targets: Side, rows: Int64) -> Counter[str]:
        counts = np.zeros(len(self.labels), np.int64)
        for row in rows.tolist():
            counts[_of(targets, row)] += 1
        return Counter(dict(zip(self.labels, counts.tolist(), strict=True)))

    def _names(self, targets: Side, row: int) -> str:
        return SEPARATOR.join(self.labels[number] for number in _of(targets, row).tolist())


def contradictions(texts: Side, targets: Side, split_keys: UInt64) -> Iterator[list[int]]:
    """Of each text that rows have with different labels, the numbers of these rows; in the order of the first ones."""
    order = np.argsort(split_keys, kind="stable")
    borders = np.flatnonzero(np.diff(split_keys[order])) + 1
    found = []
    for alike in np.split(order, borders):
        if len(alike) < 2:
            continue
        by_text: dict[bytes, list[int]] = {}
        for row in alike.tolist():
            by_text.setdefault(_of(texts, row).tobytes(), []).append(row)
        found += [rows for rows in by_text.values() if len({_of(targets, row).tobytes() for row in rows}) > 1]
    yield from sorted(found)


def _of(side: Side, row: int) -> Tokens:
    numbers, ends = side
    return numbers[int(ends[row]) : int(ends[row + 1])]
