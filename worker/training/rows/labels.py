"""Labels of rows: one text, or several, which may be none."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from jobs.companions import CompanionColumns
from worker.training.rows.row import LABEL_TWICE, NO_LABEL, NOT_ONE, Defect
from worker.training.rows.text import Joined, Template, list_in, plain_text, template

UNLABELLED = "-1"
"""How public data sets write that a row has no label, where their classes are numbered."""
SEPARATORS = "#;|,"
"""What divides the labels of a row in a text. Doccano writes `#`."""
_MOST = 0.75
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")
_ITEM = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?[0-9]+(?:\.[0-9]+)?""", re.DOTALL)
_LIST = re.compile(rf"\[\s*+(?:(?:{_ITEM.pattern})(?:\s*+,\s*+|\s++))*(?:{_ITEM.pattern})?\s*+\]", re.DOTALL)
"""Blanks are never given back: the time is linear in the text."""
_LONGEST = 512
_GROUPS = 20
NOT_NAMED = "a label that task.labels does not name"
TOO_LONG = f"a label of more than {_LONGEST} characters"


@dataclass(frozen=True)
class KnownLabels:
    """What a label in a row stands for, among those of a classifier."""

    names: frozenset[str]
    several: bool = False
    """A text may hold several labels, divided by one of SEPARATORS."""
    as_written: bool = False
    """A label stands for itself alone, as in earlier versions."""

    @classmethod
    def of(cls, names: Iterable[str], *, several: bool, as_written: bool = False) -> KnownLabels:
        """These."""
        return cls(frozenset(names), several, as_written)

    def read(self, label: str) -> list[str]:
        """The known labels that it stands for. Raises Defect where it stands for none."""
        if label in self.names:
            return [label]
        if self.as_written:
            raise Defect(NOT_NAMED)
        number = whole_number(label)
        if number is not None and number in self._by_number:
            return [self._by_number[number]]
        if number == UNLABELLED and are_numbered(self.names):
            raise Defect(NO_LABEL)
        for separator in SEPARATORS if self.several else "":
            parts = divided(label, separator)
            if (
                parts
                and parts != [label]
                and all(part in self.names or whole_number(part) in self._by_number for part in parts)
            ):
                return [name for part in parts for name in self.read(part)]
        raise Defect(NOT_NAMED)

    @cached_property
    def _by_number(self) -> Mapping[str | None, str]:
        return {number: name for name in self.names if (number := whole_number(name)) is not None}


@dataclass(frozen=True)
class LabelTemplate(Template):
    """What the label of a row is made of. Filled in, it is the label; of `several` labels, a JSON list of them."""

    several: bool = False
    known: KnownLabels | None = None
    """Labels that a row may have; None: any."""
    as_written: bool = False
    """As in earlier versions, for which a text was a list only with `several`, and as JSON."""
    verbatim: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        text: str,
        param: str,
        companions: CompanionColumns,
        *,
        several: bool,
        known: KnownLabels | None,
        as_written: bool = False,
    ) -> LabelTemplate:
        """Raises Rejected (`bad_template`)."""
        plain = template(text, param)
        return cls(
            plain.source, plain.literals, plain.placeholders, companions, several=several, known=known,
            as_written=as_written,
        )  # fmt: skip

    def fill(self, row: Mapping[str, Any], joined: list[Joined] | None = None) -> str:
        """See `Template`. Raises Defect also for a list that is not one label, and for labels that are not known."""
        found = self._labels(row)
        if len(set(found)) < len(found):
            raise Defect(LABEL_TWICE)
        if self.known is not None:
            found = [name for label in found for name in self.known.read(label)]
        if any(len(label) > _LONGEST for label in found):
            raise Defect(TOO_LONG)
        if len(set(found)) < len(found):  # 1 and 1.0
            raise Defect(LABEL_TWICE)
        return json.dumps(found, ensure_ascii=False) if self.several else found[0]

    def _labels(self, row: Mapping[str, Any]) -> list[str]:
        value = self.whole_value(row)
        if self.as_written and isinstance(value, str):
            if self.several:
                value = [] if value.strip() in ("", "[]") else list_in(value) or value
        elif isinstance(value, str) and not (self.known and value in self.known.names):
            items = [] if self.several and not value.strip() else _list_of_labels(value)
            value = items if items or (self.several and items is not None) else value
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


def _list_of_labels(text: str) -> list[str] | None:
    """The labels of a list as JSON, Python or NumPy writes it; None: it is none."""
    text = text.strip()
    if (found := list_in(text)) is not None or not _LIST.fullmatch(text):
        return found
    return [str(ast.literal_eval(item)) if item[0] in "'\"" else item for item in _ITEM.findall(text)]


def whole_number(label: str) -> str | None:
    """The whole number that it is, also where pandas has made `1.0` of 1; None: it is none."""
    found = _WHOLE.fullmatch(label)
    return found and found[1]


def are_numbered(labels: Iterable[str]) -> bool:
    """Whether they are whole numbers from 0 on, as most public data sets number their classes."""
    numbers = {whole_number(label) for label in labels}
    return "0" in numbers and all(number is not None and number[0] != "-" for number in numbers)


def divided(label: str, separator: str) -> list[str]:
    """The labels in a text, empty ones left out."""
    return [part for each in label.split(separator) if (part := each.strip())]


def separator_of(found: Mapping[str, int]) -> str | None:
    """What divides the labels of rows (`found`: how many rows have each text) where a text holds several; else None.

    Most of what it divides occurs alone as well, or beside different others, and fewer labels are left.
    """
    for separator in SEPARATORS:
        parts = {label: divided(label, separator) for label in found if separator in label}
        several = {label: each for label, each in parts.items() if len(each) > 1}
        if separator == "," and all(len(each) == 2 and "".join(each).isdecimal() for each in several.values()):
            continue  # a decimal comma
        beside = Counter(part for each in several.values() for part in set(each))
        alone = {part for label in found.keys() - several.keys() for part in parts.get(label, [label])}
        known = {part for part, often in beside.items() if part in alone or often > 1}
        shares = [(found[label], part in known) for label, each in several.items() for part in each]
        total, of_known = sum(rows for rows, _ in shares), sum(rows for rows, is_known in shares if is_known)
        if several and of_known >= _MOST * total and len(beside.keys() | alone) < len(found):
            return separator
    return None


def labels_alike(labels: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """Labels that differ in case, blanks, invisible characters or the writing of a number or truth value alone; twenty
    groups at most.

    People take them for one, a classifier learns them apart.
    """
    groups: dict[object, list[str]] = {}
    for label in labels:
        groups.setdefault(_looks(label), []).append(label)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)[:_GROUPS]


_TRUTH = {"false": "0", "true": "1"}


def _looks(label: str) -> object:
    visible = "".join(each for each in unicodedata.normalize("NFKC", label) if unicodedata.category(each) != "Cf")
    text = " ".join(visible.casefold().split())
    try:
        return float(_TRUTH.get(text, text))
    except ValueError:
        return text
