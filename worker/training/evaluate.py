"""Looking at the model on rows it does not learn from: loss per target token, and a few generated texts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from jobs.errors import NonFinite, OutOfMemory
from jobs.events import Sample
from worker.training.dataset.data import Int64, Rows
from worker.training.journal import Journal
from worker.training.loop import token_loss_sum
from worker.training.machine.out_of_memory import KINDS, Shortage
from worker.training.machine.usage import Cache
from worker.training.memory.recovery import Pass, give_back
from worker.training.network.model import LoadedModel
from worker.training.steps.batches import IGNORED, micro_batches
from worker.training.steps.limits import Limit, SafeSize
from worker.training.steps.order import Widths
from worker.training.stop import Stop

MAX_NEW_TOKENS = 64
GROUP = 32
"""Rows that go through the model together, where memory allows it."""

Result = TypeVar("Result")
log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class Evaluation:
    """Mean negative log likelihood of a target token (nats) over `rows` rows, and generated texts."""

    loss: float
    rows: int
    seconds: float
    samples: list[Sample]


def evaluate(
    loaded: LoadedModel,
    rows: Rows,
    *,
    max_rows: int,
    samples: int,
    micro_batch: int,
    safe: Mapping[str, SafeSize] | None = None,
    cache: Cache,
    journal: Journal,
    stop: Stop,
) -> Evaluation:
    """Evaluate on the first `max_rows` rows and generate for the first `samples` of them.

    Training is not disturbed: no gradients, the RNG is put back, the model is left in the mode it was in. Micro-batches
    are those of training at most; when memory runs out all the same, this is done again in smaller ones of that length
    bucket, which training does not hear of. Raises StopAsked between two batches, OutOfMemory at one row.
    """
    start = time.perf_counter()
    training = loaded.model.training
    count = min(max_rows, len(rows))
    widths, limit = Widths(rows), Limit.of(rows, micro_batch, safe)
    looked_at, shown = (widths.groups(np.arange(some), GROUP) for some in (count, min(samples, count)))
    devices = [cache.device] if cache.device.type == "cuda" else []
    loaded.model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():

            def loss_of(going: Pass, limit: Limit) -> float:
                return _loss(loaded, rows, going, limit, journal, stop)

            def texts_of(going: Pass, limit: Limit) -> list[Sample]:
                return _generate(loaded, rows, going, limit, journal, stop)

            loss, limit = _fitting(loss_of, rows, looked_at, limit, cache)
            texts, _ = _fitting(texts_of, rows, shown, limit, cache)
    finally:
        loaded.model.train(training)
    return Evaluation(loss=loss, rows=count, seconds=time.perf_counter() - start, samples=texts)


def _fitting(
    work: Callable[[Pass, Limit], Result], rows: Rows, groups: Sequence[Int64], limit: Limit, cache: Cache
) -> tuple[Result, Limit]:
    """The result of some work over the groups, and the limit with which memory was enough for it."""
    while True:
        going = Pass(0, groups, began=time.perf_counter())
        try:
            return work(going, limit), limit
        except KINDS as error:
            shortage = Shortage.of(error, cache.device)
            if shortage is None:
                raise
        give_back(cache)
        shape = going.shape(rows, limit)
        bucket = shape.bucket
        smaller = limit.lowered(rows, groups, shape, passing=True)
        if smaller is None:
            raise OutOfMemory(
                f"memory ran out in an evaluation at micro-batch 1, one row of {bucket}: {shortage.text}",
                hint="lower data.max_input_tokens and data.max_target_tokens, or take a smaller model",
            )
        log.warning(
            "memory ran out in an evaluation; it is done again with %d instead of %d rows of %s: %s",
            smaller.size(bucket), limit.size(bucket), bucket, shortage.text,
        )  # fmt: skip
        limit = smaller


def _loss(loaded: LoadedModel, rows: Rows, going: Pass, limit: Limit, journal: Journal, stop: Stop) -> float:
    journal.phase("evaluate")
    total = torch.zeros((), dtype=torch.float64, device=loaded.model.device)
    going.batches = batches = micro_batches(rows, going.groups, limit, loaded.pad_id)
    for done, batch in enumerate(batches):
        stop.look()
        going.at = done
        total += token_loss_sum(loaded.model, batch)
        journal.progress((done + 1) / len(batches))
    loss = float(total.item()) / sum(batch.target_tokens for batch in batches)
    if not math.isfinite(loss):
        raise NonFinite(
            f"the validation loss is {loss}: the weights do not give numbers any more",
            hint="lower schedule.learning_rate, or look at the validation rows; the checkpoints before are intact",
        )
    return loss


def _generate(loaded: LoadedModel, rows: Rows, going: Pass, limit: Limit, journal: Journal, stop: Stop) -> list[Sample]:
    if not going.groups:
        return []
    journal.phase("generate")
    decode = loaded.tokenizer.decode
    texts: dict[int, Sample] = {}
    going.batches = batches = micro_batches(rows, going.groups, limit, loaded.pad_id)
    for number, batch in enumerate(batches):
        stop.look()
        going.at = number
        device = loaded.model.device
        written = loaded.model.generate(  # type: ignore[operator]  # typed as Tensor | Module
            input_ids=batch.input_ids.to(device),
            attention_mask=batch.attention_mask.to(device),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )
        for index, row in enumerate(batch.rows):
            labels = batch.labels[index]
            texts[int(row)] = Sample(
                input=decode(batch.input_ids[index], skip_special_tokens=True),
                target=decode(labels[labels != IGNORED], skip_special_tokens=True),
                generated=decode(written[index], skip_special_tokens=True),
            )
        journal.progress(len(texts) / sum(map(len, going.groups)))
    return [texts[row] for row in sorted(texts)]
