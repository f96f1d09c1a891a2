"""Labels of rows: one text, or several, which may be none."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from worker.training.rows.row import LABEL_TWICE, NO_LABEL, Defect
from worker.training.rows.text import Joined, Template, list_in, plain_text, template

UNLABELLED = "-1"
"""How public data sets write that a row has no label, where their classes are numbered."""
_NUMBER = re.compile("0|[1-9][0-9]*")
_LONGEST = 512
_GROUPS = 20
NOT_NAMED = "a label that task.labels does not name"
NOT_ONE = "a list that is not one label"
TOO_LONG = f"a label of more than {_LONGEST} characters"


@dataclass(frozen=True)
class KnownLabels:
    """What a label in a row stands for, among those of a classifier."""

    names: frozenset[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> KnownLabels:
        """These."""
        return cls(frozenset(names))

    def read(self, label: str) -> list[str]:
        """The known labels that it stands for. Raises Defect where it stands for none."""
        if label in self.names:
            return [label]
        if label == UNLABELLED and are_numbered(self.names):
            raise Defect(NO_LABEL)
        raise Defect(NOT_NAMED)


@dataclass(frozen=True)
class LabelTemplate(Template):
    """What the label of a row is made of. Filled in, it is the label; of `several` labels, a JSON list of them."""

    several: bool = False
    known: KnownLabels | None = None
    """Labels that a row may have; None: any."""
    verbatim: ClassVar[bool] = True

    @classmethod
    def of(cls, text: str, param: str, *, several: bool, known: KnownLabels | None) -> LabelTemplate:
        """Raises Rejected (`bad_template`)."""
        plain = template(text, param)
        return cls(plain.source, plain.literals, plain.placeholders, several, known)

    def fill(self, row: Mapping[str, Any], joined: list[Joined] | None = None) -> str:
        """See `Template`. Raises Defect also for a list that is not one label, and for labels that are not known."""
        found = self._labels(row)
        if self.known is not None:
            found = [name for label in found for name in self.known.read(label)]
        if any(len(label) > _LONGEST for label in found):
            raise Defect(TOO_LONG)
        if len(set(found)) < len(found):
            raise Defect(LABEL_TWICE)
        return json.dumps(found, ensure_ascii=False) if self.several else found[0]

    def _labels(self, row: Mapping[str, Any]) -> list[str]:
        value = self.whole_value(row)
        if self.several and isinstance(value, str):
            value = [] if value.strip() in ("", "[]") else list_in(value) or value
        if not isinstance(value, list):
            return [super().fill(row).strip()]
        name = self.placeholders[0].name
        found = [text for item in value if (text := plain_text(item, name).strip())]
        if not self.several and len(found) != 1:
            raise Defect(NOT_ONE)
        return found


def labels_in(text: str, *, several: bool) -> list[str]:
    """The labels of a row, of the text that `LabelTemplate` made of them."""
    if not several:
        return [text]
    labels: list[str] = json.loads(text)
    return labels


def are_numbered(labels: Collection[str]) -> bool:
    """Whether they are whole numbers from 0 on, as most public data sets number their classes."""
    return "0" in labels and all(_NUMBER.fullmatch(label) for label in labels)


def labels_alike(labels: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Labels that differ in case, blanks, invisible characters or the writing of a number alone; twenty groups at most.

    People take them for one, a classifier learns them apart.
    """
    groups: dict[object, list[str]] = {}
    for label in labels:
        groups.setdefault(_looks(label), []).append(label)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)[:_GROUPS]


def _looks(label: str) -> object:
    visible = "".join(each for each in unicodedata.normalize("NFKC", label) if unicodedata.category(each) != "Cf")
    text = " ".join(visible.casefold().split())
    try:
        return float(text)
    except ValueError:
        return text
