"""Generated texts beside their targets: exact match, chrF and BLEU (sacrebleu), ROUGE.

chrF and BLEU are those of the whole corpus, ROUGE is the mean of the rows' F1, as the package rouge-score has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np
import regex

from jobs.evaluation_metrics import EvaluationMetric
from worker.training.scores.statistics import Statistics, Sums, sacrebleu_metric

_M = EvaluationMetric
_ROUGE = (_M.ROUGE1, _M.ROUGE2, _M.ROUGEL)
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
    found: dict[EvaluationMetric, Statistics] = {}
    if not targets:
        return found
    if _M.EXACT_MATCH in metrics:
        equal = [one.strip() == other.strip() != "" for one, other in zip(targets, generated, strict=True)]
        found[_M.EXACT_MATCH] = Sums.ratio(_M.EXACT_MATCH, equal, 1)
    for metric in (_M.CHRF, _M.BLEU):
        if metric in metrics:
            scorer = sacrebleu_metric(metric, characters=is_unspaced(targets))
            numbers = scorer._extract_corpus_statistics(generated, [targets])
            found[metric] = Sums(metric, np.array(numbers, np.float64))
    if asked := [metric for metric in _ROUGE if metric in metrics]:
        scores = []
        for target, text in zip(targets, generated, strict=True):
            wanted, given = words_of(target), words_of(text)
            scores.append([_rouge(metric, wanted, given) for metric in asked])
            progress()
        found |= {metric: Sums.ratio(metric, [row[at] for row in scores], 1) for at, metric in enumerate(asked)}
    return found


def _rouge(metric: EvaluationMetric, target: list[str], text: list[str]) -> float:
    """F1 of the words, of the pairs of words, or of the longest common subsequence; 0 where a text has no word."""
    if metric is _M.ROUGEL:
        common, wanted, given = _longest_common(target, text), len(target), len(text)
    else:
        ngrams = [
            Counter(zip(*(words[n:] for n in range(_ROUGE.index(metric) + 1)), strict=False))
            for words in (target, text)
        ]
        common, wanted, given = (ngrams[0] & ngrams[1]).total(), ngrams[0].total(), ngrams[1].total()
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
