"""Generated texts beside their targets: exact match, chrF and BLEU (sacrebleu), ROUGE (rouge-score).

chrF and BLEU are those of the whole corpus, ROUGE is the mean of the rows' F1. Both libraries are imported where texts
are scored: nltk, which rouge-score needs, takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

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


class Words:
    """A tokenizer for rouge-score, whose own drops every letter but a to z: of a Russian text nothing is left.

    Words are runs of letters, marks and digits, in lower case: on ASCII texts the same as with its own tokenizer. Of
    scripts without spaces each character is a word.
    """

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
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
        for row in _rouge(targets, generated, asked):
            scores.append(row)
            progress()
        found |= {metric: Sums.ratio(metric, [row[at] for row in scores], 1) for at, metric in enumerate(asked)}
    return found


def _rouge(
    targets: Sequence[str], generated: Sequence[str], metrics: Sequence[EvaluationMetric]
) -> Iterator[list[float]]:
    """[rows, metrics] F1."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(map(str, metrics)), tokenizer=Words())
    for target, text in zip(targets, generated, strict=True):
        found = scorer.score(target, text)
        yield [found[metric].fmeasure for metric in metrics]
