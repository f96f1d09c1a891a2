"""Which labels a classifier has, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jobs.errors import BadData, Rejected
from jobs.preview import RowPreview, TextPreview
from jobs.spec import MOST_LABELS
from worker.training.dataset.data import token_dtype
from worker.training.dataset.encoding import EncodedRows, Limits
from worker.training.dataset.preview import SHOWN
from worker.training.dataset.tokens import EncodedTexts, Encoder, TokenizerState, open_tokenizer, unusable
from worker.training.rows.labels import (
    NOT_NAMED,
    UNLABELLED,
    KnownLabels,
    are_numbered,
    divided,
    labels_in,
    separator_of,
    whole_number,
)
from worker.training.rows.row import LABEL_TWICE, NO_LABEL, REPAIRS, Defect
from worker.training.rows.scores import like_scores
from worker.training.rows.text import Texts
from worker.training.tasks.classification.pairs import PairFrame, SentencePairs, end_of, types_begin

SEPARATOR = "; "
"""Between the labels of a row, for people."""

_SHOWN = 5
_AS_SCORES = "--set task.type=regression"


def chosen_labels(
    found: Mapping[str, int],
    *,
    named: Sequence[str] | None,
    known: Sequence[str] | None,
    least: int,
    several: bool = False,
    as_written: bool = False,
) -> list[str]:
    """The labels by number: those that the model knows, else those that the job names, else the `found` ones, sorted.

    `known`: of a model that has a head already; then all others must be among them. Raises Rejected (`other_labels`),
    BadData (`doubtful_label`, `too_few_labels`, `too_many_labels`). `as_written`: see `KnownLabels`.
    """
    if known is not None:
        if set(known) == {f"LABEL_{number}" for number in range(len(known))}:  # how transformers names what has no name
            numbers = [str(number) for number in range(len(known))]
            known = list(named) if named is not None and len(named) == len(known) else numbers
        two = {whole_number(label) for label in known} == {"0", "1"}
        if two and named is None and not as_written and UNLABELLED in map(whole_number, found):
            raise _doubtful("to learn three classes, take the model that it was made from; --set 'task.labels=[0,1]'")
        reading = KnownLabels.of(known, several=several, as_written=as_written)
        wanted = list(named) if named is not None else ordered(rows_of_labels(found, reading))
        others = [label for label in wanted if label not in set(known)]
        if others or (named is not None and list(named) != list(known)):
            raise _other_labels(wanted, known, several=several)
        return list(known)
    labels = list(named) if named is not None else ordered(found if as_written else classes_of(found, several=several))
    if len(labels) > MOST_LABELS:
        raise BadData(
            f"data.target: the rows have {len(labels):,} different labels, and {MOST_LABELS:,} are the most; "
            f"they begin with {_listed(labels)}",
            code="too_many_labels",
            param="data.target",
            hint=f"are they scores? to learn numbers, add {_AS_SCORES}"
            if like_scores(found)
            else "is it the column of labels? a column of texts that are all different has none",
        )
    if len(labels) < least:
        raise BadData(
            f"data.target: all rows have the same label {_listed(labels)}: there is nothing to tell apart",
            code="too_few_labels",
            param="data.target",
            hint="name another column, or all labels in task.labels",
        )
    return labels


def check_no_vectors(found: Mapping[str, int], usable: int) -> None:
    """Raise BadData (`doubtful_label`) where each of so many rows has the labels 0 and 1: [0, 1] and [1, 0] say which
    of two classes a row has."""
    if {whole_number(label) for label in found} == {"0", "1"} and sum(found.values()) == 2 * usable:
        raise BadData(
            "data.target: every row has the labels 0 and 1: lists such as [0, 1] look like vectors",
            code="doubtful_label",
            param="data.target",
            hint=REPAIRS[LABEL_TWICE],
        )


def rows_of_labels(found: Mapping[str, int], known: KnownLabels) -> Counter[str]:
    """How many rows have each label, `found` ones read as the known ones that they stand for, or as themselves."""
    rows = Counter[str]()
    for label, count in found.items():
        try:
            names = known.read(label)
        except Defect as defect:
            names = [] if str(defect) == NO_LABEL else [label]
        for name in names:
            rows[name] += count
    return rows


def how_read(found: Mapping[str, int], chosen: Sequence[str], *, several: bool) -> tuple[str, ...]:
    """What people should know of how the labels of rows are read as the chosen ones, a sentence each."""
    by_number = {number: name for name in chosen if (number := whole_number(name)) is not None}
    equal = [(label, name) for label in found if (name := by_number.get(whole_number(label) or "", label)) != label]
    said = [f"{label} is read as {name}: they are the same number" for label, name in sorted(equal)[:_SHOWN]]
    if like_scores(found):
        said.append(f"labels look like scores ({_listed(ordered(found))}); to learn numbers, add {_AS_SCORES}")
    elif (separator := separator_of(found)) is not None:
        parts = _listed(sorted({part for label in found for part in divided(label, separator)}))
        if several:
            said.append(f"texts that {separator} divides are read as several labels: {parts}")
        else:
            looks = f"labels look like several in one, divided by {separator} ({parts})"
            said.append(f"{looks}; to learn each, add --set task.multi_label=true")
    return tuple(said)


def classes_of(found: Mapping[str, int], *, several: bool) -> set[str]:
    """The labels that are classes: of `several` in a text each, of equal numbers one, and without -1 for none.

    Raises BadData (`doubtful_label`).
    """
    separator = separator_of(found) if several else None
    texts = found.keys() if separator is None else {part for label in found for part in divided(label, separator)}
    numbers: dict[str, str] = {}  # the shortest of each: 1 rather than 1.0
    for label in sorted(texts, key=len, reverse=True):
        numbers[whole_number(label) or label] = label
    unlabelled = numbers.pop(UNLABELLED, None)
    others = set(numbers.values())
    if unlabelled is None:
        return others
    if len(others) < 2 or not are_numbered(others):
        return others | {unlabelled}
    if numbers.keys() == {"0", "1"}:
        raise _doubtful("say which: --set 'task.labels=[-1,0,1]' learns three classes, --set 'task.labels=[0,1]'")
    return others


def _doubtful(hint: str) -> BadData:
    return BadData(
        "data.target: the labels are -1, 0 and 1, and -1 may be a class of its own or mean that a row has no label",
        code="doubtful_label",
        param="data.target",
        hint=f"{hint} leaves out the rows with -1",
    )


def ordered(labels: Collection[str]) -> list[str]:
    """Whole numbers by value, others by their characters."""
    if all(label.removeprefix("-").isdecimal() for label in labels):
        return sorted(labels, key=lambda label: (int(label), label))
    return sorted(labels)


def _other_labels(wanted: Sequence[str], known: Sequence[str], *, several: bool) -> Rejected:
    return Rejected(
        f"model: it is a classifier already, with {len(known)} labels ({_listed(known)}), and the job has "
        f"{len(wanted)} ({_listed(wanted)})",
        code="other_labels",
        param="model",
        hint="its one output is a score: set task: regression"
        if len(known) == 1 and not several
        else "name the pretrained model that it was made from; or write its labels, as the data names them, into "
        "id2label of its config.json, in the order of its head",
    )


def _listed(labels: Sequence[str]) -> str:
    shown = ", ".join(label[:50] for label in labels[:_SHOWN])
    return shown + (", …" if len(labels) > _SHOWN else "")


# -- rows --------------------------------------------------------------------------------------------------------------
# Rows of a classifier as numbers: the tokens of the text, and the numbers of its labels.


@dataclass(frozen=True)
class ClassTokenizer(TokenizerState):
    """A tokenizer of an encoder: its `end` is the token that it puts behind a text, `</s>` or `[SEP]`."""

    typed: bool = False
    """Whether transformers hands its token types to the model."""
    frame: PairFrame | None = None
    """What it puts around pairs; known once it was `tried` with some."""

    @classmethod
    def read(cls, folder: Path) -> ClassTokenizer:
        """The tokenizer in a model folder. Raises Rejected (`tokenizer_unusable`)."""
        tokenizer = open_tokenizer(folder)
        end = end_of(tokenizer)
        if None in (end, tokenizer.pad_token_id, tokenizer.unk_token_id):
            raise unusable(f"the tokenizer in {folder} lacks a separator, padding or unknown token")
        fast = tokenizer.backend_tokenizer
        fast.no_truncation()
        fast.no_padding()
        typed = "token_type_ids" in tokenizer.model_input_names
        return cls(
            fast.to_str(), end, tokenizer.pad_token_id, tokenizer.unk_token_id, len(tokenizer), typed=typed
        )  # fmt: skip

    def framed(self, pairs: Sequence[Sequence[str]]) -> ClassTokenizer:
        """The same, for pairs of texts such as these, the first of a job. Raises Rejected (`tokenizer_unusable`)."""
        return replace(self, frame=PairFrame.of(self.open(), pairs))

    @property
    def types_begin(self) -> int | None:
        """The token behind which token types of pairs are 1; None: the model gets none from it. Raises Rejected
        (`tokenizer_unusable`)."""
        return types_begin(self.open(), self.end) if self.typed else None


class ClassEncoder:
    """By a tokenizer that was tried; `labels` by number."""

    def __init__(self, tokenizer: ClassTokenizer, limits: Limits, labels: Sequence[str], *, several: bool) -> None:
        self._encoder, self._limit = Encoder(tokenizer), limits["input"]
        self._pairs = None if tokenizer.frame is None else SentencePairs(tokenizer, tokenizer.frame)
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._several, self._dtype = several, token_dtype(tokenizer.size)

    def encode(self, texts: Sequence[Texts]) -> EncodedRows:
        """A defect: a label that has no number."""
        numbers: list[list[int]] = []
        defects: dict[int, str] = {}
        for place, one in enumerate(texts):
            try:
                numbers.append(self.numbers(one.target))
            except Defect as defect:
                defects[place] = str(defect)
        lengths = np.array([len(row) for row in numbers], np.int32)
        kept = [one.read for place, one in enumerate(texts) if place not in defects]
        target = EncodedTexts(
            tokens=np.array([number for row in numbers for number in row], self._dtype),
            lengths=lengths,
            full_lengths=lengths,
            unknown_tokens=np.zeros(len(numbers), np.int32),
            unknown={},
        )
        return EncodedRows({"input": self.encode_read(kept), "target": target}, defects)

    def encode_read(self, read: Sequence[Sequence[str]]) -> EncodedTexts:
        """What a model reads of rows by one template (`Texts.read`): a text of each, or a pair of texts."""
        if any(len(texts) == 2 for texts in read):
            assert self._pairs is not None, "the tokenizer was tried with pairs"
            return self._pairs.encode(read, self._limit)
        return self._encoder.encode([text for [text] in read], self._limit)

    def preview(self, number: int, texts: Texts, rewritten: Mapping[str, int]) -> RowPreview:
        """The text, and its labels as they stand."""
        self.numbers(texts.target)
        if texts.second:
            assert self._pairs is not None, "the tokenizer was tried with pairs"
            inspected = self._pairs.inspect(texts.input, texts.second, self._limit)
        else:
            inspected = [self._encoder.inspect(texts.input, self._limit)]
        input, *second = (
            TextPreview(
                text=text[:SHOWN], characters=len(text), tokens=tokens, cut_characters=cut, unknown=dict(unknown)
            )
            for text, (tokens, cut, unknown) in zip(texts.read, inspected, strict=True)
        )
        written = SEPARATOR.join(labels_in(texts.target, several=self._several))
        return RowPreview(
            number=number,
            input=input,
            second=second[0] if second else None,
            target=TextPreview(
                text=written[:SHOWN], characters=len(written), tokens=None, cut_characters=0, unknown={}
            ),
            rewritten=dict(rewritten),
        )

    def numbers(self, target: str) -> list[int]:
        """Those of its labels, ascending. Raises Defect where one has none."""
        labels = labels_in(target, several=self._several)
        if not self._numbers.keys() >= set(labels):
            raise Defect(NOT_NAMED)
        return sorted(self._numbers[label] for label in labels)
