"""Which labels a classifier has, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jobs.errors import BadData, Rejected
from jobs.spec import MOST_LABELS

_SHOWN = 5


def chosen_labels(
    found: Collection[str], *, named: Sequence[str] | None, known: Sequence[str] | None, least: int
) -> list[str]:
    """The labels by number: those that the model knows, else those that the job names, else the `found` ones, sorted.

    `known`: of a model that has a head already; then all others must be among them. Raises Rejected (`other_labels`),
    BadData (`too_few_labels`, `too_many_labels`).
    """
    if known is not None:
        wanted = list(named) if named is not None else ordered(found)
        if set(known) == {f"LABEL_{number}" for number in range(len(known))}:  # how transformers names what has no name
            numbers = [str(number) for number in range(len(known))]
            known = list(named) if named is not None and len(named) == len(known) else numbers
        others = [label for label in wanted if label not in set(known)]
        if others or (named is not None and list(named) != list(known)):
            raise _other_labels(wanted, known)
        return list(known)
    labels = list(named) if named is not None else ordered(found)
    if len(labels) > MOST_LABELS:
        raise BadData(
            f"data.target: the rows have {len(labels):,} different labels, and {MOST_LABELS:,} are the most; "
            f"they begin with {_listed(labels)}",
            code="too_many_labels",
            param="data.target",
            hint="is it the column of labels? a column of texts that are all different has none",
        )
    if len(labels) < least:
        raise BadData(
            f"data.target: all rows have the same label {_listed(labels)}: there is nothing to tell apart",
            code="too_few_labels",
            param="data.target",
            hint="name another column, or all labels in task.labels",
        )
    return labels


def ordered(labels: Collection[str]) -> list[str]:
    """Whole numbers by value, others by their characters."""
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _other_labels(wanted: Sequence[str], known: Sequence[str]) -> Rejected:
    return Rejected(
        f"model: it is a classifier already, with {len(known)} labels ({_listed(known)}), and the job has "
        f"{len(wanted)} ({_listed(wanted)})",
        code="other_labels",
        param="model",
        hint="name the pretrained model that it was made from; or write its labels, as the data names them, into "
        "id2label of its config.json, in the order of its head",
    )


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(label[:50] for label in labels[:_SHOWN])
    return shown + (", …" if len(labels) > _SHOWN else "")
