"""What is lost of a text when it becomes tokens."""

from __future__ import annotations

import pytest
from tokenizers import normalizers

from jobs.evaluation_metrics import EvaluationMetric
from tests.training.dataset.test_words import ODD, recipe_texts
from worker.training.dataset.tokens import Encoder, TokenizerState
from worker.training.rows.text import Texts
from worker.training.scores.statistics import score
from worker.training.scores.texts import text_statistics
from worker.training.tasks.seq2seq.builtin import learn_tokenizer
from worker.training.tasks.seq2seq.rows import PairEncoder

RECIPE = "Boil the rice.\nServe it with salt."


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> TokenizerState:
    """One that treats white space and characters as that of T5."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = learn_tokenizer([*recipe_texts(), *ODD])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.save_pretrained(folder)
    return TokenizerState.read(folder).tried(["a"])


def test_a_text_that_is_kept_is_what_its_tokens_spell(learned: TokenizerState) -> None:
    encoder, fast = Encoder(learned), learned.open()
    texts = [text for text in [*recipe_texts(), *ODD, RECIPE] if "<" not in text]
    kept = [text for text in texts if encoder.keeps(text)]
    assert len(kept) > 0.7 * len(recipe_texts()), "the others have fractions such as ½"
    for text in kept:
        assert fast.decode(fast.encode(text, add_special_tokens=False).ids) == text.strip()


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "a  b", "ﬁne", "e\u0301", "½ cup", "a\u00a0b", "▁a"])
def test_characters_that_tokens_write_as_others_are_lost(learned: TokenizerState, text: str) -> None:
    assert not Encoder(learned).keeps(text)
    assert Encoder(learned).keeps(" plain words, as ever\n")


@pytest.mark.parametrize("text", ["a\nb", "\n\nstep 1.\n\n\nstep 2.", "a\r\nb", "a \nb", "a\n  b", "a\tb", "a\nb  c"])
def test_line_breaks_are_kept_by_a_token_of_their_own(learned: TokenizerState, text: str) -> None:
    keeping = learned.keeping_line_breaks()
    assert (keeping.size, learned.new_token, keeping.new_token) == (learned.size + 1, False, True)
    assert keeping.keeping_line_breaks() is keeping, "it has one"
    assert keeping.layout(9999) == {"loses_layout": True, "loses_line_breaks": False, "can_keep_line_breaks": False}
    encoder, fast = Encoder(keeping), keeping.open()
    ids = fast.encode(text, add_special_tokens=False).ids
    lines = [" ".join(line.split()) for line in text.split("\n")]
    assert ids.count(learned.size) == text.count("\n") and fast.decode(ids) == "\n".join(lines)
    assert encoder.keeps(text) is (text.replace("\r", "") == "\n".join(lines))


def test_a_model_that_writes_no_line_break_does_not_match_a_target_with_one(learned: TokenizerState) -> None:
    rows = [Texts(input="rice", target=target) for target in ("Boil the rice.", RECIPE)]
    encoded = PairEncoder(learned, {"input": 64, "target": 64}).encode(rows)
    assert encoded.whole_targets == {1: RECIPE}, "by which the row is scored"
    written = " ".join(RECIPE.split())  # the best that this tokenizer can write
    statistics = text_statistics([rows[0].target, RECIPE], [rows[0].target, written], [EvaluationMetric.EXACT_MATCH])
    assert score(statistics[EvaluationMetric.EXACT_MATCH]) == 0.5
