"""Generated texts beside their targets: exact match, chrF and BLEU (sacrebleu), ROUGE.

chrF and BLEU are those of the whole corpus, ROUGE is the mean of the rows' F1, as the package rouge-score has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import regex

from jobs.evaluation_metrics import EvaluationMetric
from worker.training.scores.statistics import Floats, Statistics, Sums

_M = EvaluationMetric
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u30FC\uFF70\uFF9E\uFF9F"
"""Scripts that put no spaces between words; ー and the marks of half-width kana, which are of no script alone."""
_WORD = regex.compile(
    rf"[{_UNSPACED}]\p{{M}}*|[\p{{L}}\p{{N}}--[{_UNSPACED}]][\p{{L}}\p{{M}}\p{{N}}--[{_UNSPACED}]]*", regex.V1
)
_CHARACTER = regex.compile(rf"[{_UNSPACED}]")
_LETTER = regex.compile(r"\p{L}")


def words_of(text: str) -> list[str]:
    """Runs of letters, marks and digits, in lower case: on ASCII texts those of rouge-score. Of scripts without spaces
    each character is a word.
    """
    words: list[str] = _WORD.findall(text.lower())
    return words


def is_unspaced(texts: Sequence[str]) -> bool:
    """Whether most letters of these texts are of scripts without spaces, whose BLEU is of characters."""
    found = sum(len(_CHARACTER.findall(text)) for text in texts)
    return 2 * found > sum(len(_LETTER.findall(text)) for text in texts)


def text_statistics(
    targets: Sequence[str],
    generated: Sequence[str],
    metrics: Collection[EvaluationMetric],
    progress: Callable[[], object] = lambda: None,
) -> dict[EvaluationMetric, Statistics]:
    """[rows] each; those of `metrics` that are measured on texts. `progress` is called meanwhile."""
    if not targets:
        return {}
    pairs = list(zip(targets, generated, strict=True))
    found: dict[EvaluationMetric, Statistics] = {
        metric: Sums.ratio(metric, [score(*pair) for pair in pairs], 1)
        for metric, score in _OF_TEXTS.items()
        if metric in metrics
    }
    for metric, make in _OF_CORPUS.items():
        if metric in metrics:
            scorer = make(is_unspaced(targets))
            numbers = scorer._extract_corpus_statistics(generated, [targets])
            found[metric] = Sums(metric, np.array(numbers, np.float64), partial(_corpus_scores, scorer))
    if asked := {metric: score for metric, score in _OF_WORDS.items() if metric in metrics}:
        scores = []
        for pair in pairs:
            target, text = map(words_of, pair)
            scores.append([score(target, text) for score in asked.values()])
            progress()
        found |= {metric: Sums.ratio(metric, [row[at] for row in scores], 1) for at, metric in enumerate(asked)}
    return found


def _equal(target: str, text: str) -> bool:
    return target.strip() == text.strip() != ""


def _chrf(unspaced: bool) -> Any:
    """As sacrebleu computes it by default."""
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


def _bleu(unspaced: bool) -> Any:
    """As sacrebleu computes it by default; of `unspaced` texts with its tokenizer `char`. Where all texts are too short
    to have 4 words in a row, of the longest rows of words that they have (`effective_order`)."""
    from sacrebleu.metrics.bleu import BLEU

    # force: no warning about tokenized texts.
    return BLEU(tokenize="char" if unspaced else None, effective_order=True, force=True)


def _corpus_scores(scorer: Any, sums: Floats) -> Floats:
    return np.array([scorer._compute_score_from_stats(row).score for row in sums.round().astype(int).tolist()])


def _rouge_n(n: int, target: list[str], text: list[str]) -> float:
    """F1 of runs of n words."""
    one, other = (Counter(zip(*(words[start:] for start in range(n)), strict=False)) for words in (target, text))
    return _f1((one & other).total(), one.total(), other.total())


def _rouge_l(target: list[str], text: list[str]) -> float:
    """F1 of the longest common subsequence."""
    return _f1(_longest_common(target, text), len(target), len(text))


def _f1(common: int, wanted: int, given: int) -> float:
    """0 where a text has no word."""
    if not common:
        return 0.0
    precision, recall = common / given, common / wanted
    return 2 * precision * recall / (precision + recall)


def _longest_common(one: list[str], other: list[str]) -> int:
    """Words of their longest common subsequence, by the bits of one number (Hyyrö 2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(one):
        places[word] = places.get(word, 0) | 1 << place
    all_places = unmatched = (1 << len(one)) - 1
    for word in other:
        matched = unmatched & places.get(word, 0)
        unmatched = (unmatched + matched | unmatched - matched) & all_places
    return len(one) - unmatched.bit_count()


_OF_TEXTS: Mapping[EvaluationMetric, Callable[[str, str], float]] = {_M.EXACT_MATCH: _equal}
"""Of a target and a generated text; the metric is the mean over rows."""
_OF_WORDS: Mapping[EvaluationMetric, Callable[[list[str], list[str]], float]] = {
    _M.ROUGE1: partial(_rouge_n, 1), _M.ROUGE2: partial(_rouge_n, 2), _M.ROUGEL: _rouge_l,
}  # fmt: skip
"""The same of their words."""
_OF_CORPUS: Mapping[EvaluationMetric, Callable[[bool], Any]] = {_M.CHRF: _chrf, _M.BLEU: _bleu}
"""Scorers of sacrebleu, for texts that are unspaced or not."""
