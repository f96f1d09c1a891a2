"""Looking at the model on rows it does not learn from: its loss, what it writes, and how well, by each metric."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from jobs.errors import NonFinite, OutOfMemory
from jobs.evaluation_metrics import ConfusionMatrix, EvaluationMetric, judging_metrics
from jobs.spec import BUILTIN_MODELS
from jobs.trainer_facts import Sample
from jobs.verdict import Base, BaseDifference, ConfidenceInterval
from worker.training import row_figures
from worker.training.context import TrainingContext
from worker.training.dataset.data import Int64, Rows
from worker.training.dataset.split import evaluation_rows
from worker.training.machine.out_of_memory import KINDS, MemoryShortage
from worker.training.memory.recovery import Pass, others_left, release_memory
from worker.training.optimizers.loss_scaling import BEYOND_FLOAT16
from worker.training.planning.budget import texts_together
from worker.training.scores.statistics import Floats, difference, interval, score
from worker.training.scores.texts import is_unspaced, text_statistics
from worker.training.tasks.evaluated import Answers
from worker.training.tasks.task import Limit, Measured
from worker.training.tasks.widths import EVALUATED_TOGETHER

_M = EvaluationMetric
_GUESSED = 0.97
"""Share of the loss of a model that finds every token as probable, above which one is no better than that: the losses
of random weights lie around it."""
Result = TypeVar("Result")
log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class Evaluation:
    """Mean negative log likelihood of a target token (nats) over `rows` rows, metrics by name, and generated texts."""

    loss: float
    rows: int
    text_rows: int
    """Those of them whose generated texts are scored."""
    bleu_of_characters: bool
    seconds: float
    samples: list[Sample]
    metrics: dict[str, float]
    intervals: dict[str, ConfidenceInterval]
    against_base: dict[str, BaseDifference]
    """Empty before the first step."""
    judged_by: str
    """The metric that says whether the model is better than before training."""
    base: Base
    against_commonest: BaseDifference | None
    """By that metric, of a classifier or a regression."""
    generated_texts: int
    empty_texts: int
    confusion: ConfusionMatrix | None = None


def evaluate(context: TrainingContext) -> Evaluation:
    """Evaluate on some rows, always the same, and generate for some of them: as many of each as the job says. Leaves
    what was found of each row in the run directory.

    Training is not disturbed: no gradients, the RNG is put back, the model is left in the mode it was in. Micro-batches
    are those of training at most; texts, which need less, are written more together. When memory runs out anyway,
    others on the GPU are waited for once; else this is done again in smaller ones of that length bucket, which training
    does not hear of. Raises StopAsked between two batches, OutOfMemory at one row.
    """
    start = time.perf_counter()
    rows, loaded, cache, state = context.data.validation, context.loaded, context.cache, context.state
    evaluation, training = context.spec.evaluation, loaded.model.training
    asked = evaluation.measured(loaded.task.metrics)
    count = min(evaluation.max_rows, len(rows))
    scored = min(count, evaluation.scored_rows) if any(metric.of_texts for metric in asked) else 0
    written = max(scored, min(evaluation.samples, count))
    chosen = partial(evaluation_rows, len(rows), choice=context.plan.data.evaluation_rows)
    # Of training, which is what was planned, and what `safe` was learned in.
    widths, limit = loaded.task.widths(rows), loaded.task.limit(context.data.train, state.micro_batch, state.safe)
    looked_at, shown = (widths.groups(chosen(some), EVALUATED_TOGETHER) for some in (count, written))
    devices = [cache.device] if cache.device.type == "cuda" else []
    loaded.model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            (loss, measured), limit = _fitting(_loss, context, looked_at, limit)
            if not loaded.task.has_labels:
                shown, limit = _longest_first(rows, chosen(written)), _limit_of_texts(context, limit)
            written_of, _ = _fitting(_generate, context, shown, limit)
    finally:
        loaded.model.train(training)
    texts = {row: written_of[row] for row in sorted(chosen(scored).tolist())}
    targets, generated = ([getattr(text, side) for text in texts.values()] for side in ("target", "generated"))
    statistics = {**measured.statistics, **text_statistics(targets, generated, asked, context.journal.progress)}
    statistics = {metric: each for metric, each in statistics.items() if metric in (_M.LOSS, *asked)}
    missing = [metric for metric in asked if metric not in statistics]
    assert not missing, f"nothing computes {', '.join(missing)}, which may decide which checkpoint is the best"
    looked_at_rows = sorted(chosen(count).tolist())
    context.journal.fence()
    row_figures.write(context.run, state.step, statistics, looked_at_rows, texts)
    base = row_figures.before_training(context.run, statistics, looked_at_rows, texts) if state.step else {}
    figures = {str(metric): score(each) for metric, each in statistics.items() if metric is not _M.LOSS}
    finite = {name: figure for name, figure in figures.items() if math.isfinite(figure)}
    intervals = {str(metric): found for metric, each in statistics.items() if (found := interval(each)) is not None}
    judging = judged_by(context, [_M.LOSS.value, *finite], intervals)
    commonest = [(statistics[metric], each) for metric, each in measured.commonest.items() if metric == judging]
    written_texts = [] if loaded.task.has_labels else [text.generated for text in written_of.values()]
    return Evaluation(
        loss=loss,
        rows=count,
        text_rows=scored,
        bleu_of_characters=_M.BLEU in statistics and is_unspaced(targets),
        samples=[written_of[row] for row in chosen(min(evaluation.samples, count)).tolist()],
        metrics=finite,
        intervals=intervals,
        against_base={
            str(metric): found
            for metric, each in base.items()
            if (found := difference(statistics[metric], each)) is not None
        },
        judged_by=judging,
        base=_base(context, score(base.get(_M.LOSS, statistics[_M.LOSS])) if base or not state.step else None),
        against_commonest=difference(*commonest[0]) if commonest else None,
        generated_texts=len(written_texts),
        empty_texts=sum(not text.strip() for text in written_texts),
        confusion=measured.confusion,
        seconds=time.perf_counter() - start,
    )


def judged_by(context: TrainingContext, measured: Sequence[str], certain: Collection[str]) -> str:
    """The metric that says whether the model is better than before training: that of `checkpoint.best` where it names
    another than the loss; else the first of `judging_metrics` that is measured on enough rows to be `certain`.

    Of plain text, of which any continuation may be as good, texts tell nothing: the loss does. Nor do they tell of a
    model that began with random weights: the letters that such a one writes without end have a high recall of short
    n-grams.
    """
    best, task, rows = context.spec.checkpoint.best, context.loaded.task, context.data.validation
    if best != _M.LOSS and best in measured:
        return str(best)
    learned, read = rows.target_lengths.sum(), rows.input_lengths.sum()
    plain = not (task.targets_apart or task.has_labels) and learned >= read - len(rows)
    by_texts = not plain and context.spec.model not in BUILTIN_MODELS
    known = [str(metric) for metric in judging_metrics(by_texts=by_texts) if metric in measured]
    return next((metric for metric in known if metric in certain), known[0])


def _base(context: TrainingContext, loss: float | None) -> Base:
    """What the model before step 1 was, by its validation loss, where that is known."""
    if context.spec.model in BUILTIN_MODELS:
        return "untrained"
    if context.plan.model.new:
        return "new_head"
    loaded = context.loaded
    guess = math.inf if loaded.task.has_labels else math.log(loaded.model.config.vocab_size)
    return "pretrained" if loss is None or loss < _GUESSED * guess else "at_chance"


def _longest_first(rows: Rows, chosen: Int64) -> list[Int64]:
    """As one group, by the expected lengths of their texts: each batch is written until its longest has ended."""
    return [chosen[np.lexsort((-rows.input_lengths[chosen], -rows.target_lengths[chosen]))]] if len(chosen) else []


def _limit_of_texts(context: TrainingContext, limit: Limit) -> Limit:
    """By what training leaves; `limit`: of the loss, as far as memory was enough."""
    task, fits = context.loaded.task, min(map(limit.size, (limit.longest.bucket, *limit.safe)))
    config = context.loaded.config
    return limit.of_texts(texts_together(context.plan.memory, task, config, _most_tokens(context), fits))


def _most_tokens(context: TrainingContext) -> int:
    """Of a text that is written."""
    asked = context.spec.evaluation.sample_tokens
    return context.longest_target if asked == "auto" else asked


def _fitting(
    work: Callable[[TrainingContext, Pass, Limit], Result],
    context: TrainingContext,
    groups: Sequence[Int64],
    limit: Limit,
) -> tuple[Result, Limit]:
    """The result of some work over the groups, and the limit with which memory was enough for it."""
    rows, cache, waited = context.data.validation, context.cache, False
    while True:
        going = Pass(0, groups, began=time.perf_counter())
        try:
            return work(context, going, limit), limit
        except KINDS as error:
            shortage = MemoryShortage.of(error, cache.device)
            if shortage is None:
                raise
        shortage = shortage.beside(context.monitor.use())
        release_memory(cache)
        if shortage.cause == "other_processes" and not waited:
            waited = True
            if others_left(context, shortage):
                continue
        shape = going.shape(rows, limit)
        bucket = shape.bucket
        smaller = limit.lowered(rows, groups, shape, passing=True)
        if smaller is None:
            raise OutOfMemory(
                f"memory ran out in an evaluation at micro-batch 1, one row of {bucket}: {shortage.text}",
                hint=f"lower {' and '.join(context.loaded.task.limit_keys)}, or take a smaller model",
            )
        log.warning(
            "memory ran out in an evaluation; it is done again with %d instead of %d rows of %s: %s",
            smaller.size(bucket), limit.size(bucket), bucket, shortage.text,
        )  # fmt: skip
        limit = smaller


def _loss(context: TrainingContext, going: Pass, limit: Limit) -> tuple[float, Measured]:
    loaded, journal = context.loaded, context.journal
    journal.phase("evaluate")
    total = torch.zeros((), dtype=torch.float64, device=loaded.model.device)
    going.batches = batches = limit.batches(context.data.validation, going.groups, loaded.pad_id)
    by_row: list[tuple[Floats, Answers]] = []
    for done, batch in enumerate(batches):
        context.stop.raise_if_asked()
        going.at = done
        seen = batch.evaluated(loaded.model)
        total += seen.loss_sum
        by_row.append(batch.by_row(seen))
        del seen  # before the next batch has its own
        journal.progress((done + 1) / len(batches))
    loss = float(total.item()) / sum(batch.target_tokens for batch in batches)
    if not math.isfinite(loss):
        raise NonFinite(
            f"the validation loss is {loss}: the weights do not give numbers any more",
            hint=("" if context.scaling is None else f"{BEYOND_FLOAT16}; ")
            + "lower training.learning_rate, or look at the validation rows; the checkpoints before are intact",
        )
    chosen = np.concatenate([batch.rows for batch in batches])
    order = np.argsort(chosen)
    losses, answers = (np.concatenate(side)[order] for side in zip(*by_row, strict=True))
    return loss, loaded.task.measured(context.data.validation, chosen[order], losses, answers)


def _generate(context: TrainingContext, going: Pass, limit: Limit) -> dict[int, Sample]:
    """By row."""
    if not going.groups:
        return {}
    loaded, journal = context.loaded, context.journal
    journal.phase("generate")
    most = _most_tokens(context)
    texts: dict[int, Sample] = {}
    going.batches = batches = limit.batches(context.data.validation, going.groups, loaded.pad_id)
    for number, batch in enumerate(batches):
        context.stop.raise_if_asked()
        going.at = number
        samples = batch.samples(loaded.model, loaded.tokenizer, most)
        texts.update(zip(batch.rows.tolist(), samples, strict=True))
        journal.progress(len(texts) / sum(map(len, going.groups)))
    whole = context.data.validation.whole_targets(texts)
    return {row: text.model_copy(update={"target": whole.get(row, text.target)}) for row, text in texts.items()}
