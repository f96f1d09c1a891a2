"""Words tokenized once give what the tokenizer gives."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from tests.training.workplace import EXAMPLES, SHARED_DATA
from worker.training.dataset import tokens
from worker.training.dataset.conversion import add_line_break
from worker.training.dataset.tokens import WordTokens
from worker.training.tasks.seq2seq.builtin import learn_tokenizer

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
def learned() -> Tokenizer:
    return learn_tokenizer(recipe_texts()).backend_tokenizer


@pytest.mark.parametrize("line_breaks", [False, True])
def test_the_built_in_tokenizer(learned: Tokenizer, line_breaks: bool) -> None:
    tokenizer = Tokenizer.from_str(learned.to_str())
    if line_breaks:
        add_line_break(tokenizer)
    recipes = recipe_texts()
    lines = ["\n".join(recipes[at : at + 5]) for at in range(0, 100, 5)]
    assert differences(tokenizer, [*ODD, "one </s>\n\n two\n", *lines, *recipes]) == []


def test_when_memory_is_full_it_begins_anew(learned: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_REMEMBERED_BYTES", 2000)
    assert differences(learned, recipe_texts()[:300]) == []
    memory = WordTokens.of(learned, np.dtype("<u2"))
    assert memory is not None
    memory.tokens(" ".join(map(str, range(25))))
    assert 0 < len(memory) < 15
    assert memory.bytes <= 2000


# Not getrusage: a child's ru_maxrss begins with that of the process that started it.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tokenizers import Tokenizer
from worker.training.dataset.tokens import WordTokens
memory = WordTokens.of(Tokenizer.from_str(sys.stdin.read()), np.dtype("<u2"))
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
for number in range(12_000):
    memory.tokens(f"{number:0250d}")
print(peak() - before)
"""


def test_the_tokenizer_remembers_no_words_besides(learned: Tokenizer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=learned.to_str(), check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 60_000  # KiB


def test_long_words_take_no_more_memory(learned: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_REMEMBERED_BYTES", 1 << 20)
    memory = WordTokens.of(learned, np.dtype("<u2"))
    assert memory is not None
    for length in (1000, 5000):
        memory.tokens(" ".join(f"{n:0{length}d}" for n in range(300)))
        held = sum(sys.getsizeof(word) + sys.getsizeof(tokens) for word, tokens in memory.items())
        assert held <= memory.bytes <= 1 << 20


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
def test_other_tokenizers_are_not_taken(learned: Tokenizer, change: Callable[[Tokenizer], None]) -> None:
    other = Tokenizer.from_str(learned.to_str())
    assert WordTokens.of(other, np.dtype("<u2")) is not None
    change(other)
    assert WordTokens.of(other, np.dtype("<u2")) is None


def test_a_normalizer_of_whole_texts_sees_whole_texts(learned: Tokenizer) -> None:
    other = Tokenizer.from_str(learned.to_str())
    other.normalizer = normalizers.Sequence([normalizers.Replace("a b", "ab"), normalizers.Lowercase()])
    assert differences(other, ["Mix a b well", "a b a b"]) == []
