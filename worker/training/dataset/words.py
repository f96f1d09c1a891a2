"""Tokenizing each word once: for tokenizers that look at one word at a time, as T5's does.

A recipe has 170 words, and 20,000 recipes 40,000 different ones: remembering their tokens makes tokenizing several
times as fast as `encode_batch_fast`, with the same result.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
