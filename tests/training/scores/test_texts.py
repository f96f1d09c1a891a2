"""Scores of generated texts: those of sacrebleu and rouge-score on the same texts, in every script."""

from __future__ import annotations

import random

import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer

from jobs.evaluation_metrics import EvaluationMetric, metrics_of
from worker.training.scores.statistics import score
from worker.training.scores.texts import is_unspaced, text_statistics, words_of

M = EvaluationMetric
WORDS = "the restaurant serves cheap French food, isn't it? 3.5 stars; Café family_friendly (yes) A1".split()  # noqa: SIM905


def drawn(seed: int, rows: int) -> tuple[list[str], list[str]]:
    """Targets, and texts that share some of their words; a few are empty, or equal."""
    draw = random.Random(seed)
    targets = [" ".join(draw.choices(WORDS, k=draw.randint(1, 30))) for _ in range(rows)]
    texts = [" ".join(w for w in [*each.split(), *draw.choices(WORDS, k=4)] if draw.random() < 0.7) for each in targets]
    return targets, [*texts[:-2], "", f" {targets[-1]}\n"]


def scores(targets: list[str], texts: list[str]) -> dict[str, float]:
    return {str(metric): score(each) for metric, each in text_statistics(targets, texts, metrics_of("seq2seq")).items()}


@pytest.mark.parametrize("seed", range(5))
def test_they_are_those_of_the_libraries(seed: int) -> None:
    targets, texts = drawn(seed, 40)
    found = scores(targets, texts)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(texts, [targets]).score, abs=1e-12)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [targets], force=True).score, abs=1e-12)
    assert found["exact_match"] == np.mean(
        [one.strip() == other.strip() for one, other in zip(targets, texts, strict=True)]
    )
    ascii_only = [[text.encode("ascii", "ignore").decode() for text in side] for side in (targets, texts)]
    found = scores(*ascii_only)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    each = [scorer.score(target, text) for target, text in zip(*ascii_only, strict=True)]
    for name in ("rouge1", "rouge2", "rougeL"):
        assert found[name] == pytest.approx(np.mean([row[name].fmeasure for row in each]), abs=1e-15)


def test_the_scores_of_resamples_are_those_of_the_resampled_texts() -> None:
    targets, texts = drawn(7, 30)
    weights = np.random.default_rng(0).integers(0, 3, (3, 30)).astype(np.float64)
    found = text_statistics(targets, texts, metrics_of("causal"))
    for metric, each in found.items():
        chosen = [np.repeat(np.arange(30), row.astype(int)) for row in weights]
        expected = [scores([targets[n] for n in rows], [texts[n] for n in rows])[metric] for rows in chosen]
        assert each.scores(weights) == pytest.approx(expected, abs=1e-9), metric


def test_bleu_of_answers_of_two_words_is_not_0_for_want_of_four() -> None:
    targets = [f"{colour} {fruit}" for colour in ("red", "green", "dark blue") for fruit in ("apple", "plum", "pear")]
    assert scores(targets[:6], targets[:6])["bleu"] == pytest.approx(100)
    assert scores(targets, [*targets[:-1], "black grape"])["bleu"] == pytest.approx(
        sacrebleu.BLEU(effective_order=True).corpus_score([*targets[:-1], "black grape"], [targets]).score
    )
    assert 60 < scores(targets, [*targets[:-1], "black grape"])["bleu"] < 100


def test_nothing_is_an_exact_match_of_nothing() -> None:
    assert scores(["", " \n", "yes"], ["", "", " yes\n"])["exact_match"] == pytest.approx(1 / 3)


def test_words_are_those_of_rouge_score_on_ascii() -> None:
    everything = "".join(map(chr, range(128))) + " Don't_stop 3.14 e-mail"
    assert words_of(everything) == DefaultTokenizer(use_stemmer=False).tokenize(everything)


@pytest.mark.parametrize(
    ("target", "text", "words"),
    [
        ("Кошка сидит на крыше", "Собака сидит на крыше", 4),
        ("القطة على السطح", "الكلب على السطح", 3),
        ("बिल्ली छत पर है", "कुत्ता छत पर है", 4),
        ("Das Café heißt Müller", "Das Café heißt Möller", 4),
        ("猫坐在屋顶上", "狗坐在屋顶上", 6),
        ("ネコが屋根の上にいる", "イヌが屋根の上にいる", 10),
        ("ラーメンを食べる", "カレーを食べる", 8),
        ("ﾗｰﾒﾝﾊﾞｰ", "ｶｰﾒﾝﾊﾞｰ", 7),
    ],
)
def test_every_script_has_words(target: str, text: str, words: int) -> None:
    assert len(words_of(target)) == words
    found = scores([target], [text])
    assert 0.4 < found["rougeL"] < 1 and found["chrf"] > 20
    assert scores([target], [target])["rouge1"] == 1


def test_bleu_of_scripts_without_spaces_is_of_characters() -> None:
    targets = ["猫坐在屋顶上，看着月亮。", "我喜欢喝绿茶 (green tea)。"]
    texts = ["狗坐在屋顶上，看着月亮。", "我喜欢喝红茶。"]
    assert is_unspaced(targets) and not is_unspaced(["a green cup 茶"])
    expected = sacrebleu.corpus_bleu(texts, [targets], tokenize="char", force=True).score
    assert scores(targets, texts)["bleu"] == pytest.approx(expected) and expected > 30


def test_no_text_has_no_score_and_an_empty_one_has_0() -> None:
    assert scores([], []) == {}
    assert set(scores(["a b"], [""]).values()) == {0.0}
