"""Looking at the model on rows it does not learn from: loss per target token, and a few generated texts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jobs.errors import NonFinite, OutOfMemory
from jobs.events import Sample
from worker.training.batches import IGNORED, Limit, micro_batches
from worker.training.data import Int64, Rows
from worker.training.journal import Journal
from worker.training.loop import token_loss_sum
from worker.training.memory import Cache, describe, is_out_of_memory
from worker.training.model import LoadedModel
from worker.training.order import Widths
from worker.training.stop import Stop

MAX_NEW_TOKENS = 64
GROUP = 32
"""Rows that go through the model together, where memory allows it."""


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
    cache: Cache,
    journal: Journal,
    stop: Stop,
) -> Evaluation:
    """Evaluate on the first `max_rows` rows and generate for the first `samples` of them.

    Training is not disturbed: no gradients, the RNG is put back, the model is left in the mode it was in. When memory
    runs out, the evaluation is done again in smaller micro-batches. Raises StopAsked between two batches, OutOfMemory.
    """
    start = time.perf_counter()
    training = loaded.model.training
    count = min(max_rows, len(rows))
    widths, limit = Widths(rows), Limit.of(rows, micro_batch)
    looked_at, shown = (widths.groups(np.arange(some), GROUP) for some in (count, min(samples, count)))
    devices = [cache.device] if cache.device.type == "cuda" else []
    loaded.model.eval()
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            while True:
                try:
                    loss = _loss(loaded, rows, looked_at, limit, journal, stop)
                    texts = _generate(loaded, rows, shown, limit, journal, stop)
                    break
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = str(error).splitlines()[0][:500]
                cache.clear()
                smaller = limit.smaller(rows, looked_at)
                if smaller is None:
                    raise OutOfMemory(
                        f"memory ran out in an evaluation at micro-batch 1: {failure} ({describe(cache.device)})",
                        hint="lower data.max_input_tokens and data.max_target_tokens, or take a smaller model",
                    )
                limit = smaller
    finally:
        loaded.model.train(training)
    return Evaluation(loss=loss, rows=count, seconds=time.perf_counter() - start, samples=texts)


def _loss(
    loaded: LoadedModel, rows: Rows, groups: Sequence[Int64], limit: Limit, journal: Journal, stop: Stop
) -> float:
    journal.phase("evaluate")
    total = torch.zeros((), dtype=torch.float64, device=loaded.model.device)
    batches = micro_batches(rows, groups, limit, loaded.pad_id)
    for done, batch in enumerate(batches, start=1):
        stop.look()
        total += token_loss_sum(loaded.model, batch)
        journal.progress(done / len(batches))
    loss = float(total.item()) / sum(batch.target_tokens for batch in batches)
    if not math.isfinite(loss):
        raise NonFinite(
            f"the validation loss is {loss}: the weights do not give numbers any more",
            hint="lower schedule.learning_rate, or look at the validation rows; the checkpoints before are intact",
        )
    return loss


def _generate(
    loaded: LoadedModel, rows: Rows, groups: Sequence[Int64], limit: Limit, journal: Journal, stop: Stop
) -> list[Sample]:
    if not groups:
        return []
    journal.phase("generate")
    decode = loaded.tokenizer.decode
    texts: dict[int, Sample] = {}
    for batch in micro_batches(rows, groups, limit, loaded.pad_id):
        stop.look()
        device = loaded.model.device
        written = loaded.model.generate(  # type: ignore[operator]
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
        journal.progress(len(texts) / sum(map(len, groups)))
    return [texts[row] for row in sorted(texts)]
