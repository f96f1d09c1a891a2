"""Words tokenised once give what the tokenizer gives."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from tests.training.workplace import EXAMPLES, SHARED_DATA
from worker.training.dataset import words
from worker.training.dataset.words import WordTokens
from worker.training.models.builtin import learn_tokenizer

ODD = [
    "", " ", "  two  spaces ", "tab\tand\r\nnewline\n", "a\u00a0b\u2009c\u2029d\u200be", "1½ cups ⅓", "ﬁne ＡＢＣ ①",
    "x\u0301y e\u0301", "▁already ▁▁marked a▁b", "the end </s> <pad>", "</s>", "<unk>a", "<extra_id_0>", "< s>",
    "emoji 👩‍🍳 and 中文 text", "a\x1cb\x1f c", "don't", "ALL CAPS", "\u3000wide", "\ufeffmark",
    "\u0085next", "a\u2028b",
]  # fmt: skip


def recipe_texts() -> list[str]:
    recipes = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    return [text for recipe in recipes for text in (recipe["title"], *recipe["ingredients"], *recipe["directions"])]


def differences(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    memory = WordTokens.of(tokenizer, np.dtype("<u2"))
    assert memory is not None
    expected = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [
        text
        for text, encoding in zip(texts, expected, strict=True)
        if np.frombuffer(memory.tokens(text), "<u2").tolist() != encoding.ids
    ]


@pytest.fixture(scope="module")
def learnt() -> Tokenizer:
    return learn_tokenizer(recipe_texts()).backend_tokenizer


def test_the_built_in_tokenizer(learnt: Tokenizer) -> None:
    assert differences(learnt, ODD + recipe_texts()) == []


def test_when_memory_is_full_it_begins_anew(learnt: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_REMEMBERED", 10)
    assert differences(learnt, recipe_texts()[:300]) == []
    memory = WordTokens.of(learnt, np.dtype("<u2"))
    assert memory is not None
    memory.tokens(" ".join(map(str, range(25))))
    assert len(memory) <= 10


def test_t5(t5_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(t5_tokenizer / "tokenizer.json"))
    assert differences(tokenizer, ODD + recipe_texts()) == []


@pytest.mark.parametrize("name", ["recipes_odd.jsonl.gz", "recipes_main_20k.jsonl.gz"])
def test_t5_on_whole_corpora(t5_tokenizer: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(t5_tokenizer / "tokenizer.json"))
    with gzip.open(SHARED_DATA / name, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    texts = [text for row in rows[:3000] for text in (row["title"], *row["ingredients"], *row["directions"])]
    assert differences(tokenizer, texts) == []


CHANGES: dict[str, Callable[[Tokenizer], None]] = {
    "words are not separate": lambda it: setattr(it, "pre_tokenizer", pre_tokenizers.Metaspace()),
    "the first word is special": lambda it: setattr(
        it,
        "pre_tokenizer",
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_other_tokenizers_are_not_taken(learnt: Tokenizer, change: Callable[[Tokenizer], None]) -> None:
    other = Tokenizer.from_str(learnt.to_str())
    assert WordTokens.of(other, np.dtype("<u2")) is not None
    change(other)
    assert WordTokens.of(other, np.dtype("<u2")) is None


def test_a_normaliser_of_whole_texts_sees_whole_texts(learnt: Tokenizer) -> None:
    other = Tokenizer.from_str(learnt.to_str())
    other.normalizer = normalizers.Sequence([normalizers.Replace("a b", "ab"), normalizers.Lowercase()])
    assert differences(other, ["Mix a b well", "a b a b"]) == []
