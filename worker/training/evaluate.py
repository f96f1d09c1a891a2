"""Looking at the model on rows it does not learn from: loss per target token, and a few generated texts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from jobs.errors import NonFinite, OutOfMemory
from jobs.events import Sample
from worker.training.context import TrainingContext
from worker.training.dataset.data import Int64
from worker.training.machine.out_of_memory import KINDS, MemoryShortage
from worker.training.memory.recovery import Pass, release_memory
from worker.training.optimizers.loss_scaling import BEYOND_FLOAT16
from worker.training.tasks.task import Limit, Measured

GROUP = 32
"""Rows that go through the model together, where memory allows it."""

Result = TypeVar("Result")
log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class Evaluation:
    """Mean negative log likelihood of a target token (nats) over `rows` rows, other measures, and generated texts."""

    loss: float
    measured: Measured
    rows: int
    seconds: float
    samples: list[Sample]


def evaluate(context: TrainingContext) -> Evaluation:
    """Evaluate on the first rows, and generate for the first of them: as many of each as the job says.

    Training is not disturbed: no gradients, the RNG is put back, the model is left in the mode it was in. Micro-batches
    are those of training at most; when memory runs out anyway, this is done again in smaller ones of that length
    bucket, which training does not hear of. Raises StopAsked between two batches, OutOfMemory at one row.
    """
    start = time.perf_counter()
    rows, loaded, cache, state = context.data.validation, context.loaded, context.cache, context.state
    evaluation, training = context.spec.evaluation, loaded.model.training
    count = min(evaluation.max_rows, len(rows))
    # Of training, which is what was planned, and what `safe` was learned in.
    widths, limit = loaded.task.widths(rows), loaded.task.limit(context.data.train, state.micro_batch, state.safe)
    looked_at, shown = (widths.groups(np.arange(some), GROUP) for some in (count, min(evaluation.samples, count)))
    devices = [cache.device] if cache.device.type == "cuda" else []
    loaded.model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            (loss, measured), limit = _fitting(_loss, context, looked_at, limit)
            texts, _ = _fitting(_generate, context, shown, limit)
    finally:
        loaded.model.train(training)
    return Evaluation(loss=loss, measured=measured, rows=count, seconds=time.perf_counter() - start, samples=texts)


def _fitting(
    work: Callable[[TrainingContext, Pass, Limit], Result],
    context: TrainingContext,
    groups: Sequence[Int64],
    limit: Limit,
) -> tuple[Result, Limit]:
    """The result of some work over the groups, and the limit with which memory was enough for it."""
    rows, cache = context.data.validation, context.cache
    while True:
        going = Pass(0, groups, began=time.perf_counter())
        try:
            return work(context, going, limit), limit
        except KINDS as error:
            shortage = MemoryShortage.of(error, cache.device)
            if shortage is None:
                raise
        release_memory(cache)
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
    answers: list[torch.Tensor] = []
    for done, batch in enumerate(batches):
        context.stop.raise_if_asked()
        going.at = done
        loss_sum, answer = batch.evaluated(loaded.model)
        total += loss_sum
        if answer is not None:
            answers.append(answer.cpu())  # as many as there are rows: not in memory that is planned
        journal.progress((done + 1) / len(batches))
    loss = float(total.item()) / sum(batch.target_tokens for batch in batches)
    if not math.isfinite(loss):
        raise NonFinite(
            f"the validation loss is {loss}: the weights do not give numbers any more",
            hint=("" if context.scaling is None else f"{BEYOND_FLOAT16}; ")
            + "lower training.learning_rate, or look at the validation rows; the checkpoints before are intact",
        )
    chosen = np.concatenate([batch.rows for batch in batches])
    answered = torch.cat(answers).numpy() if answers else np.empty(0, np.int64)
    return loss, loaded.task.measured(context.data.validation, chosen, answered)


def _generate(context: TrainingContext, going: Pass, limit: Limit) -> list[Sample]:
    if not going.groups:
        return []
    loaded, journal = context.loaded, context.journal
    journal.phase("generate")
    asked = context.spec.evaluation.sample_tokens
    most = context.longest_target if asked == "auto" else asked
    texts: dict[int, Sample] = {}
    going.batches = batches = limit.batches(context.data.validation, going.groups, loaded.pad_id)
    for number, batch in enumerate(batches):
        context.stop.raise_if_asked()
        going.at = number
        samples = batch.samples(loaded.model, loaded.tokenizer, most)
        texts.update(zip(batch.rows.tolist(), samples, strict=True))
        journal.progress(len(texts) / sum(map(len, going.groups)))
    return [texts[row] for row in sorted(texts)]
