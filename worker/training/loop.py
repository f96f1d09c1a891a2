"""The training loop: a generator that yields one `StepResult` per optimizer step (architecture.md: Trainer, Memory).

Its caller reacts to each: logs, evaluates, saves, stops. Nothing here waits for the device (of the optimizers, `adamw`
does not either), so that on CUDA the host runs ahead; losses stay tensors until their value is needed.

A step whose update is skipped (`LossScaling`) is a step over its rows: number, learning rate and order move on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from jobs.errors import OutOfMemoryInOptimizer
from worker.training.context import TrainingContext
from worker.training.dataset.data import Rows
from worker.training.journal import Journal
from worker.training.machine.out_of_memory import KINDS, MemoryShortage
from worker.training.memory.recovery import Pass, Recovery
from worker.training.network.model import LoadedModel
from worker.training.optimizers.loss_scaling import LossScaling
from worker.training.optimizers.optimizer import Optimizer
from worker.training.ranks.ranks import Failure, share
from worker.training.steps.learning_rate import learning_rate
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.steps.result import StepResult
from worker.training.tasks.task import Batch, Limit


def steps(context: TrainingContext) -> Iterator[StepResult]:
    """The steps that are left, in order; the caller brings `context.state` up to date with each.

    Memory that runs out inside a step costs time only: its gradients are dropped and the same step is redone from its
    rows with the same seed, where nothing else helps (`recovery.Recovery`) in smaller micro-batches of that length
    bucket.

    Raises NonFinite (the weights are those before the bad step), OutOfMemory (at one row, or when the job says
    `on_oom: fail`), OutOfMemoryInOptimizer (then nothing may be repeated: some weights may be updated, others not),
    StopAsked in a wait (the weights are those of the step before).
    """
    training, plan, order, rows = context.spec.training, context.plan, context.order, context.data.train
    loaded, journal, device, ranks = context.loaded, context.journal, context.cache.device, context.ranks
    model, flops, apart = loaded.model, loaded.flops, loaded.task.targets_apart
    limit = loaded.task.limit(rows, context.state.micro_batch, context.state.safe)
    recovery, scaling = Recovery(context), context.scaling
    model.train()
    number = context.state.step
    while number < context.length.steps and not context.length.stopped_early:
        number += 1
        start = time.perf_counter()
        if opens_epoch(order, number):
            limit = limit.regrown()
        groups = order.groups_of(number - 1)
        shares = [share(groups, rank, ranks.count) for rank in range(ranks.count)]
        rate = learning_rate(
            number,
            peak=training.learning_rate,
            steps=plan.steps,
            warmup=plan.warmup_steps,
            lr_scheduler=training.lr_scheduler,
            correction=context.state.correction,
        )
        data_wait = time.perf_counter() - start
        while True:
            ranks.begin(number, rate, limit)
            going = Pass(number, shares[0], began=time.perf_counter())
            wanted = recovery.oom_reports.wanted
            failure = one_pass(loaded, rows, limit, going, training.seed, scaling, journal, details=wanted)
            data_wait += going.cutting_s
            vote = ranks.vote(failure, going.target_tokens, time.perf_counter() - going.began)
            failure = vote.failure
            if failure is None:
                break
            if failure.rank:
                going = Pass(number, shares[failure.rank], began=going.began, failed=failure.shape)
            limit = recovery.retry(failure.shortage, going, limit)
            del failure, vote  # its snapshot can be large
        loss = ranks.add_up(going.loss)
        norm = update(context.optimizer, number, rate, loss, device)
        model.zero_grad(set_to_none=True)
        journal.progress(number / context.length.steps, step=number)
        lengths = [(rows.input_lengths[group], rows.target_lengths[group]) for group in groups]
        own = [batch.shape for batch in going.batches]
        shapes = [*own, *(shape for groups in shares[1:] for shape in limit.shapes(rows, groups))]
        yield StepResult(
            step=number,
            epoch=order.epoch_of(number - 1),
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            rows=sum(map(len, groups)),
            input_tokens=sum(int(inputs.sum()) for inputs, _ in lengths) - (0 if apart else vote.target_tokens),
            target_tokens=vote.target_tokens,
            padded_tokens=sum(shape.tokens if apart else shape.inputs for shape in shapes),
            flops=sum(flops.rows(*both) for both in lengths) / ranks.count,
            data_wait_s=data_wait,
            micro_batch=min(limit.size(shape.bucket) for shape in shapes),
            largest=max(own, key=lambda shape: shape.tokens),
            safe=limit.safe,
            scaled=None if scaling is None else scaling.last,
        )
        if not model.training:  # the caller has evaluated
            model.train()


def opens_epoch(order: StepOrder, number: int) -> bool:
    """Whether step `number` (from 1) is the first that begins in a new epoch; the first of a run is not."""
    done, before = (order.epoch_of(count - 1) if count > 0 else 0.0 for count in (number - 1, number - 2))
    return int(done) > int(before)


def one_pass(
    loaded: LoadedModel,
    rows: Rows,
    limit: Limit,
    going: Pass,
    seed: int,
    scaling: LossScaling | None,
    journal: Journal,
    *,
    rank: int = 0,
    details: Callable[[], bool] = lambda: False,
) -> Failure | None:
    """Forward and backward over the share of a step that this rank has, which may be empty; `going` holds what came
    of it. Failure: memory ran out.

    By the time it returns, no traceback is left that would keep the activations of a failed pass alive.
    """
    try:
        going.batches = limit.batches(rows, going.groups, loaded.pad_id)
        going.cutting_s = time.perf_counter() - going.began
        seed_step(seed, going.step, rank)
        if going.batches:
            going.loss = accumulate(
                loaded.model, going.batches, journal, going, 1.0 if scaling is None else scaling.scale
            )
    except KINDS as error:
        shortage = MemoryShortage.of(error, loaded.model.device, details=details())
        if shortage is None:
            raise
        return Failure(rank, shortage, going.shape(rows, limit))
    return None


def accumulate(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    journal: Journal | None = None,
    going: Pass | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Forward and backward over the micro-batches of one step: adds to `.grad`, returns the loss (0-dim, detached).

    The loss is the sum over target tokens / all target tokens of the step: the same however its rows are cut.
    `going` records which of them is in the model. `scale`: the gradients are those of the loss times this.
    """
    tokens = sum(batch.target_tokens for batch in batches)
    loss: torch.Tensor | None = None
    for number, batch in enumerate(batches):
        if going is not None:
            going.at = number
        part = batch.loss_sum(model) / tokens
        part.backward(torch.full_like(part, scale))
        # Without its graph, which would hold the inputs of recomputed layers, where the model is not trained, for as
        # long as the next micro-batch goes forward.
        part = part.detach()
        loss = part if loss is None else loss + part
        if journal is not None:
            journal.progress()
    assert loss is not None, "a step has rows"
    return loss


def update(optimizer: Optimizer, number: int, rate: float, loss: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`Optimizer.step`, on every rank. Raises OutOfMemoryInOptimizer as well."""
    try:
        return optimizer.step(number, rate, loss)
    except KINDS as error:
        shortage = MemoryShortage.of(error, device)
        if shortage is None:
            raise
    raise OutOfMemoryInOptimizer(
        f"memory ran out in the optimizer at step {number}: {shortage.text}",
        hint="the job resumes from its newest checkpoint; a smaller memory.micro_batch leaves the optimizer more room",
    )
