"""Tokenizers as older models on the hub have them: a vocabulary and no tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from jobs.errors import Rejected
from worker.training.dataset import conversion
from worker.training.dataset.conversion import PROBES, check_converted, converted, write_general
from worker.training.dataset.tokens import TokenizerState

WORDS = ["knead", "the", "dough,", "bake", "it", "until", "golden;", "let", "cool", "on", "a", "rack", "with", "crème"]
TEXTS = [" ".join(WORDS[n % 7 : n % 19 + 3]) + f" {n}" for n in range(300)]
ROWS = [
    *TEXTS, *PROBES, "Ünïcode, naïve café", "1/2 cup, 3½ tbsp", "tabs\t\tand   spaces  ", "İstanbul",
    "don't they'll I'd",
]  # fmt: skip


@pytest.fixture(scope="session")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """A file of sentencepiece, trained with these options."""
    made: dict[str, bytes] = {}
    folder = tmp_path_factory.mktemp("pieces")

    def train(**options: Any) -> bytes:
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            prefix = folder / str(len(made))
            SentencePieceTrainer.train(
                sentence_iterator=iter([*TEXTS, *ROWS]), model_prefix=str(prefix), minloglevel=2,
                hard_vocab_limit=False, **{"vocab_size": 300, **options},
            )  # fmt: skip
            made[key] = prefix.with_suffix(".model").read_bytes()
        return made[key]

    return train


def folder_of(root: Path, config: dict[str, Any], files: dict[str, bytes | str | dict[str, Any]]) -> Path:
    for name, content in {"config.json": config, **files}.items():
        text = json.dumps(content) if isinstance(content, dict) else content
        (root / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return root


T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
DEBERTA = {
    "pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "pad_piece": "[PAD]", "bos_piece": "[CLS]",
    "eos_piece": "[SEP]", "unk_piece": "[UNK]",
}  # fmt: skip
LLAMA = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "vocab_size": 500,
}  # fmt: skip
SENTENCEPIECE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], int]] = {
    "T5": ("t5", "spiece.model", {}, T5, 0),
    "mT5": ("mt5", "spiece.model", {"extra_ids": 0, "tokenizer_class": "T5Tokenizer"}, T5, 0),
    "DeBERTa-v3": ("deberta-v2", "spm.model", {"do_lower_case": False, "vocab_type": "spm"}, DEBERTA, 0),
    "DeBERTa, lower case": ("deberta-v2", "spm.model", {"do_lower_case": True}, DEBERTA, 0),
    "DeBERTa, not normalized": ("deberta-v2", "spm.model", {}, {**DEBERTA, "normalization_rule_name": "identity"}, 0),
    "XLM-RoBERTa": ("xlm-roberta", "sentencepiece.bpe.model", {}, {}, 1),
    "Pegasus": ("pegasus", "spiece.model", {}, T5, 103),
    "Llama": ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, LLAMA, 0),
}
"""model_type, file, tokenizer_config.json, options of training, and by how many its numbers are larger."""


@pytest.mark.parametrize(("kind", "file", "config", "options", "moved"), SENTENCEPIECE.values(), ids=SENTENCEPIECE)
def test_tokens_are_those_of_sentencepiece(
    tmp_path: Path,
    pieces: Callable[..., bytes],
    kind: str,
    file: str,
    config: dict[str, Any],
    options: dict[str, Any],
    moved: int,
) -> None:
    folder = folder_of(tmp_path, {"model_type": kind}, {file: pieces(**options), "tokenizer_config.json": config})
    check_converted(folder, ROWS)
    target = tmp_path / "target"
    target.mkdir()
    write_general(converted(folder), target)
    (target / "config.json").write_text(json.dumps({"model_type": kind}))
    opened: Any = AutoTokenizer.from_pretrained(target)
    slow: Any = SentencePieceProcessor(model_file=str(folder / file))
    for text in ROWS:
        expected = [
            opened.unk_token_id if slow.is_unknown(one) else one + moved
            for one in slow.encode(text.lower() if config.get("do_lower_case") else text)
        ]
        found = opened(text, add_special_tokens=False)["input_ids"]
        # Of pieces that are as likely in another order, any order will do.
        assert found == expected or (kind != "llama" and sorted(found) == sorted(expected)), text
    state = TokenizerState.read(folder) if kind in ("t5", "mt5", "pegasus") else None
    assert state is None or state == TokenizerState.read(target)


def wordpiece(**files: Any) -> dict[str, Any]:
    """vocab.txt as BERT has it, and nothing besides, or `files`."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special))
    vocabulary = sorted(tokenizer.get_vocab(), key=lambda token: tokenizer.get_vocab()[token])
    return {"vocab.txt": "\n".join(vocabulary) + "\n", **files}


def byte_level() -> dict[str, Any]:
    """vocab.json and merges.txt as GPT-2, RoBERTa and BART have them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<|endoftext|>", "<mask>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return {"vocab.json": model["vocab"], "merges.txt": f"#version: 0.2\n{merges}\n"}


PLAIN: dict[str, tuple[str, Callable[[], dict[str, Any]], str, list[str]]] = {
    "BERT": ("bert", wordpiece, "Knead CRÈME", ["[CLS]", "[SEP]"]),
    "BERT, cased": (
        "bert", lambda: wordpiece(**{"tokenizer_config.json": {"do_lower_case": False}}), "knead", ["[CLS]", "[SEP]"]
    ),
    "DistilBERT": ("distilbert", wordpiece, "knead", ["[CLS]", "[SEP]"]),
    "RoBERTa": ("roberta", byte_level, "knead", ["<s>", "</s>"]),
    "BART": ("bart", byte_level, "knead", ["<s>", "</s>"]),
    "GPT-2": ("gpt2", byte_level, "knead", []),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "files", "text", "around"), PLAIN.values(), ids=PLAIN)
def test_tokens_are_those_of_a_vocabulary(
    tmp_path: Path, kind: str, files: Callable[[], dict[str, Any]], text: str, around: list[str]
) -> None:
    folder = folder_of(tmp_path, {"model_type": kind}, files())
    check_converted(folder, ROWS)
    target = tmp_path / "target"
    target.mkdir()
    write_general(converted(folder), target)
    (target / "config.json").write_text(json.dumps({"model_type": kind}))
    opened: Any = AutoTokenizer.from_pretrained(target)
    ids = opened(text)["input_ids"]
    assert [token for token in opened.convert_ids_to_tokens(ids) if token in opened.all_special_tokens] == around
    assert opened.decode(ids, skip_special_tokens=True).lower() in (text.lower(), "knead creme")
    assert all(opened(one)["input_ids"] == converted(folder)(one)["input_ids"] for one in ROWS)


def test_texts_that_tell_the_two_apart_refuse_the_model(tmp_path: Path, pieces: Callable[..., bytes]) -> None:
    folder = folder_of(tmp_path, {"model_type": "t5"}, {"spiece.model": pieces(**T5)})
    # A known fault of the library tokenizers: of several marks on a letter all but the first are dropped.
    differing = "cre\u0300\u0301me"
    check_converted(folder, ["no difference"])
    with pytest.raises(Rejected, match=r"makes other tokens of .cre") as caught:
        check_converted(folder, ["no difference", differing])
    assert (caught.value.detail_code, caught.value.param) == ("tokenizer_conversion", "model")


def test_a_class_that_does_more_than_sentencepiece_is_not_made_to_do_less(
    tmp_path: Path, pieces: Callable[..., bytes]
) -> None:
    options = {**DEBERTA, "unk_piece": "<unk>", "pad_piece": "<pad>"}
    files: dict[str, Any] = {"spiece.model": pieces(**options), "tokenizer_config.json": {"do_lower_case": True}}
    with pytest.raises(Rejected, match="its fast form makes other tokens") as caught:
        converted(folder_of(tmp_path, {"model_type": "albert"}, files))
    assert caught.value.detail_code == "tokenizer_conversion"


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 791656\n"
UNREADABLE: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "damaged": ("t5", {"spiece.model": b"no file of sentencepiece"}, "spiece.model is no file of", "the vocabulary"),
    "vocab.json alone": ("bart", {"vocab.json": {"a": 0}}, "vocab.json needs merges.txt", "copy the model's"),
    "merges.txt alone": ("gpt2", {"merges.txt": ""}, "merges.txt needs vocab.json", "copy the model's"),
    "torn": ("roberta", {"vocab.json": '{"a":', "merges.txt": ""}, "cannot be used: .*EOF", "the vocabulary"),
    "empty": ("bert", {"vocab.txt": ""}, "cannot be used: .*Missing", "the vocabulary"),
    "slow only": ("canine", {"vocab.txt": "a"}, "no fast form", "put a tokenizer.json"),
    "no settings": ("bert", {"vocab.txt": "a", "tokenizer_config.json": "{"}, "cannot be used", "the vocabulary"),
    "pointer, sentencepiece": ("xlm-roberta", {"sentencepiece.bpe.model": LFS_POINTER}, "is a pointer", "git lfs pull"),
    "pointer, WordPiece": ("bert", {"vocab.txt": LFS_POINTER}, "is a pointer", "git lfs pull"),
    "pointer, merges": ("gpt2", {"vocab.json": {"a": 0}, "merges.txt": LFS_POINTER}, "is a pointer", "git lfs pull"),
}


@pytest.mark.parametrize(("kind", "files", "message", "hint"), UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize(
    "read", [TokenizerState.read, lambda folder: write_general(converted(folder), folder)], ids=["", "store"]
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, kind: str, files: dict[str, Any], message: str, hint: str, read: Callable[[Path], object]
) -> None:
    with pytest.raises(Rejected, match=message) as caught:
        read(folder_of(tmp_path, {"model_type": kind}, files))
    assert (caught.value.detail_code, caught.value.param) == ("tokenizer_conversion", "model")
    assert caught.value.hint is not None and hint in caught.value.hint


def test_a_conversion_is_made_once(tmp_path: Path, pieces: Callable[..., bytes]) -> None:
    folder = folder_of(tmp_path, {"model_type": "t5"}, {"spiece.model": pieces(**T5)})
    first = converted(folder)
    assert converted(folder) is first
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 0}))
    assert len(converted(folder)) == len(first) - 100
    assert conversion.needs_conversion(folder)
    write_general(converted(folder), folder)
    assert not conversion.needs_conversion(folder)
