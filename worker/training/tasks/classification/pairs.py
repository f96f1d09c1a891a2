"""Pairs of texts, as `tokenizer(first, second, truncation="longest_first")` of transformers reads them.

    first, second ─▶ tokens of each ─▶ the longer one cut until both fit ─▶ <s> first </s></s> second </s>

Models such as BERT are also told by token types of which text a token is: 0 up to the first separator, 1 behind it.
These follow from the tokens of a row, so a prepared dataset holds none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jobs.errors import Rejected
from worker.training.dataset.data import Int32, Int64, Tokens
from worker.training.dataset.tokens import EncodedTexts, Encoder, TokenizerState, unusable

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SAMPLE = "a"


class PairFrame(NamedTuple):
    """The tokens that a tokenizer puts around two texts."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, pairs: Sequence[Sequence[str]]) -> PairFrame:
        """As these pairs show it, or without any a short one. Raises Rejected (`tokenizer_unusable`) if it is not the
        same around each."""

        def bare(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        whole, size = tokenizer.encode(_SAMPLE, _SAMPLE), len(bare(_SAMPLE))
        if not {0, 1} <= set(whole.sequence_ids):
            raise _no_frame()
        first, second = map(whole.sequence_ids.index, (0, 1))
        places = slice(first), slice(first + size, second), slice(second + size, None)
        found = cls(*(tuple(whole.ids[place]) for place in places))
        for one, other in [(_SAMPLE, _SAMPLE), *pairs]:
            expected = [*found.before, *bare(one), *found.between, *bare(other), *found.behind]
            if tokenizer.encode(one, other).ids != expected:
                raise _no_frame()
        return found

    @property
    def size(self) -> int:
        """Tokens."""
        return sum(map(len, self))


def types_begin(tokenizer: Tokenizer, separator: int) -> int | None:
    """The token behind which the tokenizer gives type 1 in a pair, which is this one; None: it gives no other than 0.

    Raises Rejected (`tokenizer_unusable`) where types are others.
    """
    whole = tokenizer.encode(_SAMPLE, _SAMPLE)
    if not any(whole.type_ids):
        return None
    if token_types(np.array(whole.ids), separator).tolist() != whole.type_ids:
        raise unusable("the tokenizer gives token types that do not change from 0 to 1 behind the first separator")
    return separator


def token_types(tokens: Int64 | Tokens, separator: int) -> Int64:
    """[…, S] tokens -> the type of each: 0 up to the first separator of a row, 1 behind it."""
    found = tokens == separator
    types: Int64 = (np.cumsum(found, -1) - found > 0).astype(np.int64)
    return types


def longest_first(full: Int64, room: int) -> Int64:
    """[pairs, 2] tokens of both texts -> how many stay of each where they have `room` together, by the rule of
    Hugging Face's tokenizers (`truncate_encodings`): the longer is cut to what the shorter leaves; where that is less
    than the shorter has, each gets half, of an odd number the longer one more, or of equal ones the second."""
    shorter = full.min(1)
    left = np.where(shorter > room, shorter, np.maximum(shorter, room - shorter))
    halved = shorter + left > room
    kept = np.stack([np.where(halved, room // 2, shorter), np.where(halved, room - room // 2, left)], 1)
    kept[full[:, 0] > full[:, 1]] = kept[full[:, 0] > full[:, 1], ::-1]
    return np.where((full.sum(1) > room)[:, None], kept, full)


class SentencePairs:
    """Encodes pairs by a tokenizer that was tried."""

    def __init__(self, tokenizer: TokenizerState, frame: PairFrame) -> None:
        self._frame = frame
        self._texts = Encoder(replace(tokenizer, leading=(), trailing=()))

    def encode(self, pairs: Sequence[Sequence[str]], limit: int) -> EncodedTexts:
        """At most `limit` tokens of each pair, with those around its texts."""
        each = self._each(pairs, limit)
        before, between, behind = (np.array(tokens, each.tokens.dtype) for tokens in self._frame)
        texts = np.split(each.tokens, np.cumsum(each.lengths)[:-1])
        rows = (
            (before, first, between, second, behind) for first, second in zip(texts[::2], texts[1::2], strict=False)
        )
        unknown: dict[int, Counter[str]] = {}
        for text, found in each.unknown.items():
            unknown.setdefault(text // 2, Counter()).update(found)

        def by_pair(counts: Int32, more: int = 0) -> Int32:
            found: Int32 = (counts.reshape(-1, 2).sum(1) + more).astype(np.int32)
            return found

        return EncodedTexts(
            tokens=np.concatenate([each.tokens[:0], *chain.from_iterable(rows)]),
            lengths=by_pair(each.lengths, self._frame.size),
            full_lengths=by_pair(each.full_lengths, self._frame.size),
            unknown_tokens=by_pair(each.unknown_tokens),
            unknown=unknown,
        )

    def inspect(self, first: str, second: str, limit: int) -> list[tuple[int, int, Counter[str]]]:
        """Of both texts, as `Encoder.inspect`; the tokens around them are counted with the text before them, those
        before the first with that."""
        each = self._each([(first, second)], limit)
        around = len(self._frame.before) + len(self._frame.between), len(self._frame.behind)
        return [
            (kept + more, self._texts.cut_characters(text, kept), each.unknown.get(number, Counter()))
            for number, (text, kept, more) in enumerate(
                zip((first, second), each.lengths.tolist(), around, strict=True)
            )
        ]

    def _each(self, pairs: Sequence[Sequence[str]], limit: int) -> EncodedTexts:
        """[2 × pairs] texts, without what is put around them."""
        room = limit - self._frame.size
        return self._texts.encode_first(
            list(chain.from_iterable(pairs)), lambda full: longest_first(full.reshape(-1, 2), room).reshape(-1)
        )


def decoded(tokens: Sequence[int], separator: int | None, decode: Callable[[list[int]], object]) -> list[str]:
    """The texts of a row: one, or both of a pair. `separator`: what is behind each; `decode` leaves out what the
    tokenizer has added."""
    texts = [list(group) for is_text, group in groupby(tokens, lambda token: token != separator) if is_text]
    return [str(decode(text)) for text in texts]


def end_of(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The number of the token behind each text; None: there is none."""
    return tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id


def _no_frame() -> Rejected:
    return unusable("the tokenizer does not put the same tokens around every pair of texts")
