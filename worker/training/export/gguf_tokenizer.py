"""The tokenizer of a model as GGUF describes it; whether llama.cpp then cuts texts alike, its own code shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from worker.training.export.formats import Unsupported

if TYPE_CHECKING:
    from gguf import GGUFWriter

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}": "qwen2",
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}": "llama-bpe",
}
"""Regular expressions by which byte-level BPE first cuts a text, and llama.cpp's names for them."""


def write_tokenizer(writer: GGUFWriter, source: Path, vocabulary: int) -> None:
    """Tokens, merges and special tokens. Raises Unsupported.

    They are those of the tokenizer that transformers makes of the folder: for some models (Qwen2, for one) it takes
    tokens and merges of tokenizer.json, and has rules of its own by which a text is first cut.
    """
    import gguf

    tokenizer: Any = AutoTokenizer.from_pretrained(source, local_files_only=True)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE":
        raise Unsupported(f"its tokenizer is {model['type']}, and GGUF is written for BPE")
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    types = [gguf.TokenType.UNUSED] * vocabulary
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores(tokens, merges))
        writer.add_add_space_prefix(_puts_space_first(content))
        for number, token in enumerate(tokens):
            if token.startswith("<0x") and len(token) == 6:
                types[number] = gguf.TokenType.BYTE
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(content))
        writer.add_token_merges([" ".join(pair) for pair in merges])
    for added in content["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    if model.get("unk_token") is not None:
        types[model["vocab"][model["unk_token"]]] = gguf.TokenType.UNKNOWN
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for add, number in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
    ):
        if number is not None:
            add(number)
    begins = tokenizer("a").input_ids
    writer.add_add_bos_token(len(begins) > 1 and begins[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(begins) > 1 and begins[-1] == tokenizer.eos_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """[tokens] the earlier a token is merged, the higher; single characters and what is not merged stand at the end."""
    rank = {first + second: -float(number) for number, (first, second) in reversed(list(enumerate(merges)))}
    return [rank.get(token, -1e6) for token in tokens]


def _puts_space_first(content: dict[str, Any]) -> bool:
    """Whether a text gets a space in front."""
    parts = [part for part in (content.get("normalizer"), content.get("pre_tokenizer")) if part]
    parts += [each for part in parts for each in part.get("normalizers", part.get("pretokenizers", []))]
    return any(
        part["type"] == "Prepend" or (part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts
    )


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """llama.cpp's name for how a text is first cut."""
    before = content.get("pre_tokenizer") or {}
    parts = before.get("pretokenizers", [before])
    if [part.get("type") for part in parts] == ["ByteLevel"] and parts[0].get("use_regex", True):
        return "gpt-2"
    if [part.get("type") for part in parts] == ["Split", "ByteLevel"]:
        found = PATTERNS.get(parts[0]["pattern"].get("Regex", ""))
        if found is not None:
            return found
    raise Unsupported("llama.cpp has no name for how its tokenizer first cuts a text")
