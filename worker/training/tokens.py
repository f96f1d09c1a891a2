"""Texts to tokens, by the tokenizer in a model folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobs.errors import Refused


class Encoder:
    """A fast tokenizer; end-of-sequence is appended to every text.

    `</s>` or `<pad>` written in a text becomes the unknown token: a target must not end in its middle. (The tokenizers'
    `encode_special_tokens` is not enough, since these are pieces of T5's vocabulary as well.)
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a broken file may raise anything
            raise _refused(f"the tokenizer in {folder} cannot be opened: {error}") from error
        if not tokenizer.is_fast:
            raise _refused(f"the tokenizer in {folder} has no fast form")
        if None in (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id):
            raise _refused(f"the tokenizer in {folder} lacks an end-of-sequence, padding or unknown token")
        self._fast = tokenizer.backend_tokenizer
        # Some tokenizer.json come with the limits of whoever saved them.
        self._fast.no_truncation()
        self._fast.no_padding()
        self.fingerprint = hashlib.sha256(self._fast.to_str().encode()).hexdigest()
        self._end: int = tokenizer.eos_token_id
        self._padding: int = tokenizer.pad_token_id
        self._unknown: int = tokenizer.unk_token_id
        self.vocabulary = len(tokenizer)

    def encode(self, texts: Sequence[str], limit: int) -> EncodedTexts:
        """At most `limit` tokens of each text, the last being end-of-sequence."""
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [self._ended(encoding.ids[: limit - 1]) for encoding in encodings]
        unknown = sum(int(np.count_nonzero(one == self._unknown)) for one in ids)
        return EncodedTexts(ids, sum(len(encoding.ids) >= limit for encoding in encodings), unknown)

    def _ended(self, pieces: list[int]) -> npt.NDArray[np.uint32]:
        ids = np.asarray([*pieces, self._end], np.uint32)
        text = ids[:-1]
        text[(text == self._end) | (text == self._padding)] = self._unknown
        return ids


class EncodedTexts:
    """Tokens of some texts."""

    def __init__(self, ids: list[npt.NDArray[np.uint32]], truncated: int, unknown: int) -> None:
        self.ids = ids
        self.truncated = truncated
        """Texts that were longer than the limit."""
        self.unknown = unknown
        """Tokens that stand for something that the tokenizer does not know."""

    @property
    def tokens(self) -> int:
        """All together."""
        return sum(len(one) for one in self.ids)


def _refused(message: str) -> Refused:
    return Refused(
        f"model: {message}",
        code="tokenizer_unusable",
        param="model",
        hint="save the tokenizer with save_pretrained of a recent transformers, so that there is a tokenizer.json",
    )
