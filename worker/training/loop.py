"""The training loop: a generator that yields one `StepResult` per optimizer step (architecture.md: Trainer, Memory).

Its caller reacts to each: logs, evaluates, saves, stops. Nothing here waits for the device (of the optimizers, `adamw`
does not either), so that on CUDA the host runs ahead; losses stay tensors until their value is needed.

A step whose update is skipped (`LossScaling`) is a step over its rows: number, learning rate and order move on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from jobs.errors import OutOfMemoryInOptimizer
from worker.training.context import TrainingContext
from worker.training.journal import Journal
from worker.training.machine.out_of_memory import KINDS, MemoryShortage
from worker.training.memory.recovery import Pass, Recovery
from worker.training.optimizers.optimizer import Optimizer
from worker.training.steps.learning_rate import learning_rate
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.steps.result import StepResult
from worker.training.tasks.task import Batch


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
    loaded, journal, device = context.loaded, context.journal, context.cache.device
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
        data_wait = time.perf_counter() - start
        while True:
            going = Pass(number, groups, began=time.perf_counter())
            try:
                going.batches = batches = limit.batches(rows, groups, loaded.pad_id)
                data_wait += time.perf_counter() - going.began
                seed_step(training.seed, number)
                loss = accumulate(model, batches, journal, going, 1.0 if scaling is None else scaling.scale)
                break
            except KINDS as error:
                shortage = MemoryShortage.of(error, device, details=recovery.oom_reports.wanted())
                if shortage is None:
                    raise
            # Outside the `except`: inside, the traceback would keep the activations of the failed pass alive.
            limit = recovery.retry(shortage, going, limit)
            del shortage  # its snapshot can be large
        rate = learning_rate(
            number,
            peak=training.learning_rate,
            steps=plan.steps,
            warmup=plan.warmup_steps,
            lr_scheduler=training.lr_scheduler,
            correction=context.state.correction,
        )
        norm = _update(context.optimizer, number, rate, loss, device)
        model.zero_grad(set_to_none=True)
        journal.progress(number / context.length.steps, step=number)
        tokens = sum(batch.target_tokens for batch in batches)
        lengths = [(rows.input_lengths[batch.rows], rows.target_lengths[batch.rows]) for batch in batches]
        yield StepResult(
            step=number,
            epoch=order.epoch_of(number - 1),
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            rows=sum(len(batch.rows) for batch in batches),
            input_tokens=sum(int(inputs.sum()) for inputs, _ in lengths) - (0 if apart else tokens),
            target_tokens=tokens,
            padded_tokens=sum(batch.shape.tokens if apart else batch.shape.inputs for batch in batches),
            flops=sum(flops.rows(*both) for both in lengths),
            data_wait_s=data_wait,
            micro_batch=min(limit.size(batch.shape.bucket) for batch in batches),
            largest=max((batch.shape for batch in batches), key=lambda shape: shape.tokens),
            safe=limit.safe,
            scaled=None if scaling is None else scaling.last,
        )
        if not model.training:  # the caller has evaluated
            model.train()


def opens_epoch(order: StepOrder, number: int) -> bool:
    """Whether step `number` (from 1) is the first that begins in a new epoch; the first of a run is not."""
    done, before = (order.epoch_of(count - 1) if count > 0 else 0.0 for count in (number - 1, number - 2))
    return int(done) > int(before)


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


def _update(optimizer: Optimizer, number: int, rate: float, loss: torch.Tensor, device: torch.device) -> torch.Tensor:
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
