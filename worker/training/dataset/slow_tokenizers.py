"""Slow tokenizers: a vocabulary as older models on the hub have it, used as it was when the model was trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobs.errors import Rejected

FAST, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SENTENCEPIECE = ("spiece.model", "spm.model", "tokenizer.model", "sentencepiece.bpe.model")
WORDPIECE, BPE = "vocab.txt", ("vocab.json", "merges.txt")
VOCABULARIES = (*SENTENCEPIECE, WORDPIECE, *BPE)
"""Files of which a fast tokenizer can be made."""
COPY_AGAIN = f"copy the vocabulary into the folder again, completely, or a {FAST} of this model"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
Tokens = Sequence[str]
Slow = Callable[[str], Tokens]
"""A text to tokens, as the slow tokenizer does it."""


def check_vocabulary(folder: Path) -> None:
    """Refuse `tokenizer_conversion` where a file of the vocabulary is missing or is not what its name says."""
    present = [name for name in VOCABULARIES if (folder / name).exists()]
    for name in present:
        with open(folder / name, "rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise refused(
                    folder,
                    f"{name} is a pointer of Git LFS, not the file itself",
                    "run `git lfs pull` in the clone, or copy the file itself into the folder",
                )
    for name in SENTENCEPIECE:
        if name in present:
            open_sentencepiece(folder / name)
    if len(present) == 1 and present[0] in BPE:
        missing = next(name for name in BPE if name != present[0])
        raise refused(folder, f"{present[0]} needs {missing}", f"copy the model's {missing} into the folder")


def open_sentencepiece(file: Path) -> Any:
    """The SentencePieceProcessor. Raises Rejected (`tokenizer_conversion`)."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError) as error:
        raise refused(file.parent, f"{file.name} is no file of sentencepiece: {error}", COPY_AGAIN) from None


def slow_tokenizer(folder: Path, fast: Any) -> Slow:
    """That of the vocabulary in a folder; `fast` is what transformers makes of it, with the options of its class.

    Raises Rejected (`tokenizer_conversion`) where the fast one numbers its tokens otherwise.
    """
    for name in SENTENCEPIECE:
        if (folder / name).exists():
            return _sentencepiece(folder / name, fast)
    if (folder / WORDPIECE).exists():
        from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

        bert: Any = BertTokenizerLegacy.from_pretrained(folder)
        if {token: fast.convert_tokens_to_ids(token) for token in bert.vocab} != dict(bert.vocab):
            raise refused(folder, f"the fast tokenizer numbers its tokens otherwise than {WORDPIECE}")
        return lambda text: list(bert.tokenize(text))
    return _byte_level(folder, fast)


def _sentencepiece(file: Path, fast: Any) -> Slow:
    processor = open_sentencepiece(file)
    numbers = fast.get_vocab()
    pieces = range(processor.get_piece_size())
    plain = [n for n in pieces if not (processor.is_control(n) or processor.is_unknown(n) or processor.is_unused(n))]
    # Some families have special tokens in front: then all pieces move by as many.
    moved = {numbers.get(processor.id_to_piece(number), -1) - number for number in plain}
    if len(moved) != 1:
        raise refused(file.parent, f"the fast tokenizer numbers its tokens otherwise than {file.name}")
    lower = bool(getattr(fast, "do_lower_case", False))

    def tokens(text: str) -> Tokens:
        ids = processor.encode(text.lower() if lower else text)
        return [str(fast.unk_token) if processor.is_unknown(one) else processor.id_to_piece(one) for one in ids]

    return tokens


def _byte_level(folder: Path, fast: Any) -> Slow:
    """Byte-level BPE as GPT-2 has it (openai/gpt-2, encoder.py)."""
    import regex
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary, merges = (folder / name for name in BPE)
    numbers: dict[str, int] = json.loads(vocabulary.read_bytes())
    lines = merges.read_text(encoding="utf-8").split("\n")
    if any(fast.convert_tokens_to_ids(token) != number for token, number in numbers.items()):
        raise refused(folder, f"the fast tokenizer numbers its tokens otherwise than {vocabulary.name}")
    pairs = [tuple(line.split()) for line in lines if not line.startswith("#version")]
    ranks = {pair: rank for rank, pair in enumerate(pair for pair in pairs if len(pair) == 2)}
    letters = bytes_to_unicode()
    words = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    @functools.lru_cache(maxsize=10_000)
    def merged(word: str) -> Tokens:
        parts = list(word)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at, joined = 0, []
            while at < len(parts):
                both = tuple(parts[at : at + 2]) == best
                joined.append("".join(parts[at : at + 2]) if both else parts[at])
                at += 2 if both else 1
            parts = joined
        return parts

    def tokens(text: str) -> Tokens:
        before = " " if getattr(fast, "add_prefix_space", False) and text and not text[0].isspace() else ""
        found = (merged("".join(letters[byte] for byte in word.encode())) for word in words.findall(before + text))
        return [token for part in found for token in part]

    return tokens


def refused(folder: Path, what: str, hint: str | None = None) -> Rejected:
    """The error for a tokenizer that cannot be made fast."""
    return Rejected(
        f"model: the tokenizer in {folder.name} has no {FAST}, and none can be made: {what}",
        code="tokenizer_conversion",
        param="model",
        hint=hint or f"put a {FAST} of this model into its folder, or take a model that has one",
    )
