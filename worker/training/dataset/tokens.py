"""Texts to tokens, by the tokenizer in a model folder."""

from __future__ import annotations

import functools
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from jobs.errors import Rejected
from worker.training.dataset.conversion import (
    LINE_BREAK,
    add_line_break,
    converted,
    lost_line_breaks,
    needs_conversion,
    reads_as_space,
)
from worker.training.dataset.data import Int32, Int64, Tokens, token_dtype
from worker.training.rows import characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# -- words -------------------------------------------------------------------------------------------------------------
# Tokenizing each word once: for tokenizers that look at one word at a time, as T5's does.
#
# A recipe has 170 words, and 20,000 recipes 40,000 different ones: remembering their tokens makes tokenizing several
# times as fast as `encode_batch_fast`, with the same result.

_REMEMBERED_BYTES = 16 << 20
"""Words in the cache at most. A full cache is cleared; common words soon return."""
_LONG = 1 << 10
"""Longer words are not cached."""
_ENTRY_BYTES = 100
"""Of a dictionary, for each word."""
_NOT_SPACES = "\x1c\x1d\x1e\x1f"
_PRINTABLE = "".join(map(chr, range(32, 127)))
_SEPARATE_WORDS = [
    {"type": "WhitespaceSplit"},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
]


class WordTokens(dict[str, bytes]):
    """Word (normalized) → its tokens; filled as it is asked. Make it by `of`."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any], special: list[str], ascii_is_normal: bool) -> None:
        super().__init__()
        self.bytes = 0
        """That the remembered words take."""
        self._tokenizer, self._dtype = tokenizer, dtype
        # Each of these attributes is a new object every time it is asked for.
        self._normalizer, self._splitter, self._model = tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model
        self._model._resize_cache(0)  # it would remember words too, by count: 10,000 of 250 digits are 140 MB
        self._ascii_is_normal = ascii_is_normal
        line_break = tokenizer.token_to_id("\n") if "\n" in special else None
        self._line_break = None if line_break is None else self._bytes([line_break])
        special = [content for content in special if content != "\n"]
        # Tokens that are cut out of a text before its words are; and what only Python takes for white space.
        self._apart = re.compile("|".join([*map(re.escape, special), *_NOT_SPACES]))
        self._signs = {*_NOT_SPACES, *(content[0] for content in special)}

    @classmethod
    def of(cls, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> WordTokens | None:
        """For this tokenizer; None if it does more than normalize, split at white space, and look at each word."""
        content = json.loads(tokenizer.to_str())
        before, added = content["pre_tokenizer"] or {}, content["added_tokens"]
        if (
            content["model"]["type"] != "Unigram"
            or before.get("type") != "Sequence"
            or before["pretokenizers"] != _SEPARATE_WORDS
            or any(token["normalized"] for token in added)
        ):
            return None
        normalizer = content["normalizer"]
        # "Precompiled" replaces characters one by one: if it leaves each of these, it leaves every text of them.
        ascii_is_normal = normalizer is None or (
            normalizer["type"] == "Precompiled" and tokenizer.normalizer.normalize_str(_PRINTABLE) == _PRINTABLE
        )
        return cls(tokenizer, dtype, [token["content"] for token in added], ascii_is_normal)

    def tokens(self, text: str) -> bytes:
        """The tokens of a text, without end-of-sequence."""
        if any(sign in text for sign in self._signs) and self._apart.search(text):
            return self._bytes(self._tokenizer.encode(text, add_special_tokens=False).ids)
        if self._line_break is not None and "\n" in text:
            return self._line_break.join(map(self.tokens, text.split("\n")))
        if self._normalizer is not None and not (self._ascii_is_normal and text.isascii() and text.isprintable()):
            text = self._normalizer.normalize_str(text)
        return b"".join(map(self.__getitem__, text.split()))

    def __missing__(self, word: str) -> bytes:
        ids = [token.id for piece, _ in self._splitter.pre_tokenize_str(word) for token in self._model.tokenize(piece)]
        tokens = self._bytes(ids)
        if len(word) > _LONG:
            return tokens
        size = sys.getsizeof(word) + sys.getsizeof(tokens) + _ENTRY_BYTES
        if self.bytes + size > _REMEMBERED_BYTES:
            self.clear()
            self.bytes = 0
        self[word] = tokens
        self.bytes += size
        return tokens

    def _bytes(self, ids: list[int]) -> bytes:
        return np.array(ids, self._dtype).tobytes()


# -- tokens ------------------------------------------------------------------------------------------------------------

_RUN = re.compile(" [ \n]|\n ")
CHARACTERS_PER_TOKEN = 4.0
"""T5's tokenizer on English recipes: 3.9 in inputs, 4.1 in targets (10,000 rows)."""


def guessed_tokens(characters: Sequence[tuple[int, ...]]) -> Int64:
    """How many tokens texts of so many characters have, guessed while there is no tokenizer: the same shape."""
    return np.ceil(np.array(characters, np.float64) / CHARACTERS_PER_TOKEN).astype(np.int64)


@dataclass(frozen=True)
class TokenizerState:
    """A fast tokenizer in a form that can be sent to another process."""

    content: str
    """As in a tokenizer.json."""
    end: int
    padding: int
    unknown: int
    """As the one before, -1 where there is none."""
    size: int
    """Of the vocabulary."""
    leading: tuple[int, ...] = ()
    """Tokens that the tokenizer puts before every text, such as `<s>` or a language."""
    trailing: tuple[int, ...] = ()
    """Tokens that it puts after every text; end-of-sequence in any case."""
    by_words: bool = False
    """Whether tokenizing each word once gives the same."""
    new_token: bool = False
    """Whether one of its tokens is not in the model folder: that for the line break."""

    @classmethod
    def read(cls, folder: Path) -> TokenizerState:
        """The tokenizer in a model folder, with end-of-sequence, padding and unknown token, as transformers opens it.

        What it adds, and whether it can be asked word by word, is known only once it is `tried`. Raises Rejected
        (`tokenizer_unusable`).
        """
        tokenizer = open_tokenizer(folder)
        if None in (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
            raise unusable(f"the tokenizer in {folder} lacks an end-of-sequence, padding or unknown token")
        fast = tokenizer.backend_tokenizer
        # Some tokenizer.json files contain the limits set when they were saved.
        fast.no_truncation()
        fast.no_padding()
        ids = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        return cls(fast.to_str(), *ids, len(tokenizer))

    def keeping_line_breaks(self) -> TokenizerState:
        """The same with a token for the line break, if it reads line breaks as spaces. Raises Rejected
        (`line_breaks_lost`)."""
        tokenizer = self.open()
        if not reads_as_space(tokenizer, LINE_BREAK):
            return self
        add_line_break(tokenizer)
        return replace(self, content=tokenizer.to_str(), size=tokenizer.get_vocab_size(), new_token=True)

    def tried(self, texts: Sequence[str]) -> TokenizerState:
        """The same as `as_it_is`, with end-of-sequence behind every text in any case."""
        found = self.as_it_is(texts)
        return found if found.end in found.trailing else replace(found, trailing=(*found.trailing, found.end))

    def as_it_is(self, texts: Sequence[str]) -> Self:
        """The same, with what it adds and whether a shortcut gives the same for these texts, a job's first ones.

        Raises Rejected (`tokenizer_unusable`) if it does not put the same around each.
        """
        tokenizer = self.open()
        around: set[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
        words = WordTokens.of(tokenizer, token_dtype(self.size))
        for text in texts or ["a"]:
            bare = tokenizer.encode(text, add_special_tokens=False).ids
            whole = tokenizer.encode(text).ids
            places = range(len(whole) - len(bare) + 1)
            found = {
                (tuple(whole[:place]), tuple(whole[place + len(bare) :]))
                for place in places
                if whole[place : place + len(bare)] == bare
            }
            around = found if around is None else around & found
            if not around:
                raise unusable("the tokenizer does not put the same tokens before and behind every text")
            if words is not None and words.tokens(text) != np.array(bare, token_dtype(self.size)).tobytes():
                words = None
        assert around
        leading, trailing = min(around)
        return replace(self, leading=leading, trailing=trailing, by_words=words is not None)

    def check_vocabulary(self, embeddings: int) -> None:
        """Raise Rejected (`tokenizer_unusable`, `line_breaks_lost`) if there are tokens that the model has no embedding
        for."""
        if self.new_token and self.size > embeddings:
            raise lost_line_breaks(f"the model has {embeddings:,} embeddings, and no row free for another token")
        if self.size > embeddings:
            raise Rejected(
                f"model: its tokenizer has {self.size:,} tokens, and the model has embeddings for {embeddings:,}",
                code="tokenizer_unusable",
                param="model",
                hint="save the model with the tokenizer that it was trained with, or call resize_token_embeddings",
            )

    def check_limits(self, limits: Mapping[str, int], around: int | None = None) -> None:
        """Raise Rejected (`limit_too_small`) if a limit, by its job key, leaves no token for the text itself.

        `around`: tokens that do not count; None: those that the tokenizer puts around one text."""
        added = len(self.leading) + len(self.trailing) if around is None else around
        if small := {key: limit for key, limit in limits.items() if limit <= added}:
            what = " and ".join(f"{param} is {limit}" for param, limit in small.items())
            raise Rejected(
                f"{what}, but the model's tokenizer puts {added} tokens around every text: none is left for the text",
                code="limit_too_small",
                param=next(iter(small)),
                hint=f"set {' and '.join(small)} to more than {added}; the more, the less of each text is cut off",
            )

    def open(self) -> Tokenizer:
        """The tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.content)

    def layout(self, embeddings: int) -> dict[str, bool]:
        """What it makes of white space, for a model with so many embeddings, by the fields of `SourcePreview`."""
        tokenizer = self.open()
        breaks = reads_as_space(tokenizer, LINE_BREAK)
        found = {"loses_layout": reads_as_space(tokenizer, "\t", "  "), "loses_line_breaks": breaks}
        try:
            keepable = breaks and self.size < embeddings and self.keeping_line_breaks().new_token
        except Rejected:
            keepable = False
        return found | {"can_keep_line_breaks": keepable}

    def rewrites(self) -> dict[str, str]:
        """Characters that this tokenizer cannot represent, and what to write instead."""
        tokenizer = self.open()

        def tokens(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        return characters.needed(tokens, tokenizer.decode, self.unknown)


def open_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a model folder, in its fast form, which is made here if there is none.

    Raises Rejected (`tokenizer_unusable`, `tokenizer_conversion`).
    """
    from transformers import AutoTokenizer  # seconds

    try:
        if needs_conversion(folder):
            return converted(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (MemoryError, Rejected):
        raise
    except Exception as error:  # a broken file may raise anything
        raise unusable(f"the tokenizer in {folder} cannot be opened: {error}") from error
    if not tokenizer.is_fast:
        raise unusable(f"the tokenizer in {folder} has no fast form")
    fast: PreTrainedTokenizerFast = tokenizer
    return fast


@dataclass(frozen=True)
class EncodedTexts:
    """Tokens of some texts, one after the other."""

    tokens: Tokens
    """At most the limit of each text, including what the tokenizer puts before and after it."""
    lengths: Int32
    """[texts] tokens of each."""
    full_lengths: Int32
    """[texts] tokens of each without the limit."""
    unknown_tokens: Int32
    """[texts] unknown tokens of each."""
    unknown: dict[int, Counter[str]]
    """The characters that became unknown tokens, by number of the text."""

    def only(self, kept: npt.NDArray[np.bool_]) -> EncodedTexts:
        """The texts for which `kept` [texts] is true, renumbered."""
        if kept.all():
            return self
        number = np.cumsum(kept) - 1
        return EncodedTexts(
            tokens=self.tokens[np.repeat(kept, self.lengths)],
            lengths=self.lengths[kept],
            full_lengths=self.full_lengths[kept],
            unknown_tokens=self.unknown_tokens[kept],
            unknown={int(number[text]): found for text, found in self.unknown.items() if kept[text]},
        )


class Encoder:
    """A tokenizer that was tried, and puts before and behind every text what it does; at its end end-of-sequence.

    `</s>` or `<pad>` written in a text becomes the unknown token: a target must not end in its middle. (The tokenizers'
    `encode_special_tokens` is not enough, since these are pieces of T5's vocabulary as well.)
    """

    def __init__(self, state: TokenizerState) -> None:
        self._state, self._fast = state, state.open()
        self._dtype = token_dtype(state.size)
        self._words = WordTokens.of(self._fast, self._dtype) if state.by_words else None
        self._added = len(state.leading) + len(state.trailing)
        self._kept: set[str] = set()
        self._lost: set[str] = set()
        """Characters, as far as `keeps` has met them."""
        self._spells_words = self._spells("a a")
        self._spells_runs = self._spells("a  a") and self._spells("a \n a")
        self._line_breaks_alike = self._spelled("a\r\na") == "a\na"

    def encode(self, texts: Sequence[str], limit: int) -> EncodedTexts:
        """At most `limit` tokens of each text, with what stands before and behind it, for which there is room."""
        return self.encode_first(texts, lambda full: np.minimum(full, limit - self._added))

    def encode_first(self, texts: Sequence[str], kept: Callable[[Int64], Int64]) -> EncodedTexts:
        """The first tokens of each text, with what stands before and behind it. `kept`: [texts] own tokens of each ->
        how many of them stay."""
        end, padding, unknown = self._state.end, self._state.padding, self._state.unknown
        pieces = self._pieces(texts)
        flat = np.frombuffer(b"".join(pieces), self._dtype)
        full = np.array([len(piece) for piece in pieces], np.int64) // self._dtype.itemsize
        cut = kept(full)
        flat = flat[np.arange(len(flat)) - np.repeat(np.cumsum(full) - full, full) < np.repeat(cut, full)]
        lost = (flat == unknown) | (flat == end) | (flat == padding)
        lost_of = np.bincount(np.repeat(np.arange(len(texts)), cut)[lost], minlength=len(texts))
        lengths = cut + self._added
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), self._dtype)
        own = np.ones(len(tokens), bool)
        for place, token in enumerate((*self._state.leading, *self._state.trailing)):
            first = ends - lengths if place < len(self._state.leading) else ends - self._added
            tokens[first + place] = token
            own[first + place] = False
        tokens[own] = np.where(lost, unknown, flat)
        return EncodedTexts(
            tokens=tokens,
            lengths=lengths.astype(np.int32),
            full_lengths=(full + self._added).astype(np.int32),
            unknown_tokens=lost_of.astype(np.int32),
            unknown={text: self._offending(texts[text], int(cut[text])) for text in np.flatnonzero(lost_of).tolist()},
        )

    def inspect(self, text: str, limit: int) -> tuple[int, int, Counter[str]]:
        """What `encode` makes of a text: its tokens, the characters cut off its end, and the unknown ones that stay."""
        encoded = self.encode([text], limit)
        kept = int(encoded.lengths[0])
        return kept, self.cut_characters(text, kept - self._added), encoded.unknown.get(0, Counter())

    def cut_characters(self, text: str, kept: int) -> int:
        """How many characters are cut off the end of a text of whose tokens the first `kept` stay."""
        offsets = self._fast.encode(text, add_special_tokens=False).offsets
        # Where the first token that is cut off begins: the end of the last that stays may lie behind that, for a lone ▁
        # is placed on the character after it.
        return len(text) - offsets[kept][0] if kept < len(offsets) else 0

    def keeps(self, text: str) -> bool:
        """Whether its tokens spell a text as it is, but for white space around it: T5's know no line break, and write
        many a character as another. By characters, of which each is looked at once; true where a tokenizer's tokens
        do not even spell plain words."""
        if not self._spells_words:
            return True
        text = text.strip()
        if self._line_breaks_alike:
            text = text.replace("\r\n", LINE_BREAK)
        if self._beyond_ascii.search(text):
            self._look_at(set(text))
            if not self._lost.isdisjoint(text):
                return False
        return self._spells_runs or not _RUN.search(text)

    @functools.cached_property
    def _beyond_ascii(self) -> re.Pattern[str]:
        """A character other than those of ASCII that are kept: most texts have none, which is seen fast."""
        self._look_at(set(map(chr, range(0x20, 0x7F))))
        return re.compile(f"[^{re.escape(''.join(sorted(self._kept)))}]")

    def _look_at(self, characters: set[str]) -> None:
        new = characters - self._kept - self._lost
        kept = {character for character in new if not _joins(character) and self._spells(f"a{character}a")}
        self._kept |= kept
        self._lost |= new - kept

    def _spells(self, text: str) -> bool:
        return self._spelled(text) == text

    def _spelled(self, text: str) -> str:
        return str(self._fast.decode(self._fast.encode(text, add_special_tokens=False).ids))

    def _pieces(self, texts: Sequence[str]) -> list[bytes]:
        if self._words is not None:
            return [self._words.tokens(text) for text in texts]
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype).tobytes() for encoding in encodings]

    def _offending(self, text: str, kept: int) -> Counter[str]:
        """The characters of a text whose tokens are unknown. Offsets take time: only for texts that need them."""
        found: Counter[str] = Counter()
        encoding = self._fast.encode(text, add_special_tokens=False)
        for token, (start, stop) in list(zip(encoding.ids, encoding.offsets, strict=True))[:kept]:
            if token == self._state.unknown:
                found.update(text[start:stop])
            elif token in (self._state.end, self._state.padding):
                found[text[start:stop]] += 1
        return found


def unusable(message: str) -> Rejected:
    """The error for a tokenizer that rows cannot be prepared with."""
    return Rejected(
        f"model: {message}",
        code="tokenizer_unusable",
        param="model",
        hint="save the tokenizer with save_pretrained of a recent transformers, so that there is a tokenizer.json",
    )


def _joins(character: str) -> bool:
    """Whether a tokenizer may write it and the one before it as one: an accent, a part of a Korean syllable."""
    return unicodedata.category(character).startswith("M") or "\u1100" <= character <= "\u11ff"
