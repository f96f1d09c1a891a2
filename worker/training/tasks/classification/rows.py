"""Rows of a classifier as numbers: the tokens of the text, and the numbers of its labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jobs.preview import RowPreview, TextPreview
from worker.training.dataset.data import token_dtype
from worker.training.dataset.encoding import EncodedRows, Limits
from worker.training.dataset.preview import SHOWN
from worker.training.dataset.tokens import EncodedTexts, Encoder, TokenizerState, open_tokenizer, unusable
from worker.training.rows.labels import NOT_NAMED, labels_in
from worker.training.rows.row import Defect
from worker.training.rows.text import Texts
from worker.training.tasks.classification.metrics import SEPARATOR


@dataclass(frozen=True)
class ClassTokenizer(TokenizerState):
    """A tokenizer of an encoder: its `end` is the token that it puts behind a text, `</s>` or `[SEP]`."""

    @classmethod
    def read(cls, folder: Path) -> ClassTokenizer:
        """The tokenizer in a model folder. Raises Rejected (`tokenizer_unusable`)."""
        tokenizer = open_tokenizer(folder)
        end = tokenizer.sep_token_id if tokenizer.sep_token_id is not None else tokenizer.eos_token_id
        if None in (end, tokenizer.pad_token_id, tokenizer.unk_token_id):
            raise unusable(f"the tokenizer in {folder} lacks a separator, padding or unknown token")
        fast = tokenizer.backend_tokenizer
        fast.no_truncation()
        fast.no_padding()
        return cls(fast.to_str(), end, tokenizer.pad_token_id, tokenizer.unk_token_id, len(tokenizer))


class ClassEncoder:
    """By a tokenizer that was tried; `labels` by number."""

    def __init__(self, tokenizer: TokenizerState, limits: Limits, labels: Sequence[str], *, several: bool) -> None:
        self._encoder, self._limit = Encoder(tokenizer), limits["input"]
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._several, self._dtype = several, token_dtype(tokenizer.size)

    def encode(self, texts: Sequence[Texts]) -> EncodedRows:
        """A defect: a label that has no number."""
        numbers: list[list[int]] = []
        defects: dict[int, str] = {}
        for place, one in enumerate(texts):
            try:
                numbers.append(self._known(labels_in(one.target, several=self._several)))
            except Defect as defect:
                defects[place] = str(defect)
        lengths = np.array([len(row) for row in numbers], np.int32)
        kept = [one.input for place, one in enumerate(texts) if place not in defects]
        target = EncodedTexts(
            tokens=np.array([number for row in numbers for number in row], self._dtype),
            lengths=lengths,
            full_lengths=lengths,
            unknown_tokens=np.zeros(len(numbers), np.int32),
            unknown={},
        )
        return EncodedRows({"input": self._encoder.encode(kept, self._limit), "target": target}, defects)

    def preview(self, number: int, texts: Texts, rewritten: Mapping[str, int]) -> RowPreview:
        """The text, and its labels as they stand."""
        labels = labels_in(texts.target, several=self._several)
        self._known(labels)
        tokens, cut, unknown = self._encoder.inspect(texts.input, self._limit)
        written = SEPARATOR.join(labels)
        return RowPreview(
            number=number,
            input=TextPreview(
                text=texts.input[:SHOWN],
                characters=len(texts.input),
                tokens=tokens,
                cut_characters=cut,
                unknown=dict(unknown),
            ),
            target=TextPreview(
                text=written[:SHOWN], characters=len(written), tokens=None, cut_characters=0, unknown={}
            ),
            rewritten=dict(rewritten),
        )

    def _known(self, labels: Sequence[str]) -> list[int]:
        """Their numbers, ascending. Raises Defect where one has none."""
        if not self._numbers.keys() >= set(labels):
            raise Defect(NOT_NAMED)
        return sorted(self._numbers[label] for label in labels)
