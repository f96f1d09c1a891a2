"""Texts to tokens, by the tokenizer in a model folder."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jobs.errors import Refused
from worker.training.dataset.data import Int32, Tokens, token_dtype
from worker.training.dataset.words import WordTokens
from worker.training.models.model_files import CONFIG, SMALL
from worker.training.rows import characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GENERATION_CONFIG = "generation_config.json"


def fingerprint(folder: Path) -> str:
    """sha256 of whatever decides what the tokenizer in a folder makes of a text; nothing is loaded."""
    digest = hashlib.sha256()
    kind = json.loads((folder / CONFIG).read_bytes()).get("model_type")
    digest.update(f"{kind} {version('tokenizers')} {version('transformers')}".encode())
    for name in SMALL:
        if name not in (CONFIG, _GENERATION_CONFIG) and (folder / name).exists():
            digest.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenizerState:
    """A fast tokenizer in a form that can be sent to another process."""

    content: str
    """As in a tokenizer.json."""
    end: int
    padding: int
    unknown: int
    size: int
    """Of the vocabulary."""

    @classmethod
    def read(cls, folder: Path) -> TokenizerState:
        """The tokenizer in a model folder, as transformers opens it. Raises Refused (`tokenizer_unusable`)."""
        from transformers import AutoTokenizer  # seconds

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a broken file may raise anything
            raise _refused(f"the tokenizer in {folder} cannot be opened: {error}") from error
        if not tokenizer.is_fast:
            raise _refused(f"the tokenizer in {folder} has no fast form")
        if None in (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
            raise _refused(f"the tokenizer in {folder} lacks an end-of-sequence, padding or unknown token")
        fast = tokenizer.backend_tokenizer
        # Some tokenizer.json come with the limits of whoever saved them.
        fast.no_truncation()
        fast.no_padding()
        ids = (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id)
        return cls(fast.to_str(), *ids, len(tokenizer))

    def open(self) -> Tokenizer:
        """The tokenizer."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.content)

    def rewrites(self) -> dict[str, str]:
        """Characters that this tokenizer cannot represent, and what to write instead."""
        tokenizer = self.open()

        def tokens(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        return characters.needed(tokens, tokenizer.decode, self.unknown)


@dataclass(frozen=True)
class EncodedTexts:
    """Tokens of some texts, one after the other."""

    tokens: Tokens
    """At most as many of each text as the limit; the last of each is end-of-sequence."""
    lengths: Int32
    """[texts] tokens of each."""
    full_lengths: Int32
    """[texts] what they would be without the limit."""
    unknown_tokens: Int32
    """[texts] tokens of each that stand for something that the tokenizer does not know."""
    unknown: dict[int, Counter[str]]
    """The characters behind those, by number of the text."""

    def only(self, kept: npt.NDArray[np.bool_]) -> EncodedTexts:
        """The texts for which `kept` [texts] is true, numbered anew."""
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
    """A tokenizer that ends every text with end-of-sequence.

    `</s>` or `<pad>` written in a text becomes the unknown token: a target must not end in its middle. (The tokenizers'
    `encode_special_tokens` is not enough, since these are pieces of T5's vocabulary as well.)
    """

    def __init__(self, state: TokenizerState) -> None:
        self._state, self._fast = state, state.open()
        self._dtype = token_dtype(state.size)
        self._words = WordTokens.of(self._fast, self._dtype)

    def encode(self, texts: Sequence[str], limit: int) -> EncodedTexts:
        """At most `limit` tokens of each text, the last being end-of-sequence."""
        end, padding, unknown = self._state.end, self._state.padding, self._state.unknown
        pieces = self._pieces(texts)
        flat = np.frombuffer(b"".join(pieces), self._dtype)
        full = np.array([len(piece) for piece in pieces], np.int64) // self._dtype.itemsize
        cut = np.minimum(full, limit - 1)
        flat = flat[np.arange(len(flat)) - np.repeat(np.cumsum(full) - full, full) < limit - 1]
        lost = (flat == unknown) | (flat == end) | (flat == padding)
        lost_of = np.bincount(np.repeat(np.arange(len(texts)), cut)[lost], minlength=len(texts))
        is_end = np.zeros(int(cut.sum()) + len(texts), bool)
        is_end[np.cumsum(cut + 1) - 1] = True
        tokens = np.full(len(is_end), end, self._dtype)
        tokens[~is_end] = np.where(lost, unknown, flat)
        return EncodedTexts(
            tokens=tokens,
            lengths=(cut + 1).astype(np.int32),
            full_lengths=(full + 1).astype(np.int32),
            unknown_tokens=lost_of.astype(np.int32),
            unknown={text: self._offending(texts[text], limit) for text in np.flatnonzero(lost_of).tolist()},
        )

    def _pieces(self, texts: Sequence[str]) -> list[bytes]:
        if self._words is not None:
            return [self._words.tokens(text) for text in texts]
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype).tobytes() for encoding in encodings]

    def _offending(self, text: str, limit: int) -> Counter[str]:
        """What stands in a text where its tokens are unknown. The offsets cost time: only for texts that need it."""
        found: Counter[str] = Counter()
        encoding = self._fast.encode(text, add_special_tokens=False)
        for token, (start, stop) in list(zip(encoding.ids, encoding.offsets, strict=True))[: limit - 1]:
            if token == self._state.unknown:
                found.update(text[start:stop])
            elif token in (self._state.end, self._state.padding):
                found[text[start:stop]] += 1
        return found


def _refused(message: str) -> Refused:
    return Refused(
        f"model: {message}",
        code="tokenizer_unusable",
        param="model",
        hint="save the tokenizer with save_pretrained of a recent transformers, so that there is a tokenizer.json",
    )
