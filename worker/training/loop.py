"""The training loop: a generator that yields one `StepResult` per optimizer step (design §3, §9).

Its caller reacts to each: logs, evaluates, saves, stops. Nothing here waits for the device (of the optimizers, `adamw`
does not either), so that on CUDA the host runs ahead; losses stay tensors until somebody needs the number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from jobs.errors import OutOfMemory, OutOfMemoryInOptimizer
from jobs.events import OomRecovered
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training import t5_loss
from worker.training.batches import Batch, Limit, micro_batches
from worker.training.data import Int32, Rows
from worker.training.journal import Journal
from worker.training.memory import Cache, describe, is_out_of_memory
from worker.training.optimizer import Optimizer
from worker.training.order import StepOrder
from worker.training.randomness import seed_step
from worker.training.schedule import learning_rate


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was. `step` counts from 1."""

    step: int
    epoch: float
    loss: torch.Tensor
    """0-dim, on the device: mean negative log likelihood of a target token before the update, nats."""
    grad_norm: torch.Tensor
    """0-dim, on the device: global norm before clipping."""
    learning_rate: float
    rows: int
    input_tokens: int
    target_tokens: int
    padded_tokens: int
    """Positions that went through the model, inputs and targets together, padding included."""
    flops: float
    """Of the model, forward and backward, at the real lengths of the rows; 0 where they cannot be counted."""
    data_wait_s: float
    micro_batch: int
    """Rows of the longest shape in a micro-batch, from now on."""


def steps(
    model: PreTrainedModel,
    optimizer: Optimizer,
    rows: Rows,
    order: StepOrder,
    spec: JobSpec,
    plan: Plan,
    *,
    after: int,
    micro_batch: int,
    pad_id: int,
    cache: Cache,
    journal: Journal,
    flops: Callable[[Int32, Int32], float] | None = None,
    rank: int = 0,
) -> Iterator[StepResult]:
    """Steps `after` + 1 to the last, in order. `flops` counts those of rows of so many input and target tokens.

    Memory that runs out inside a step costs time only: its gradients are dropped and the same step is redone from its
    rows in micro-batches of half the size, with the same seed; the smaller size is kept.

    Raises NonFinite (the weights are those before the bad step), OutOfMemory (at micro-batch 1, or when the job says
    `on_oom: fail`), OutOfMemoryInOptimizer (then nothing may be repeated: some weights may be updated, others not).
    """
    schedule = spec.schedule
    limit = Limit.of(rows, micro_batch)
    model.train()
    for number in range(after + 1, plan.steps + 1):
        start = time.perf_counter()
        groups = order.groups_of(number - 1)
        data_wait = time.perf_counter() - start
        while True:
            lost_since, failure = time.perf_counter(), None
            try:
                batches = micro_batches(rows, groups, limit, pad_id)
                data_wait += time.perf_counter() - lost_since
                seed_step(schedule.seed, number, rank)
                loss = accumulate(model, batches, journal)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error).splitlines()[0][:500]
            # Outside the `except`: inside, the traceback would keep the activations of the failed pass alive.
            state = describe(cache.device)
            model.zero_grad(set_to_none=True)
            cache.clear()
            smaller = limit.smaller(rows, groups)
            if spec.memory.on_oom == "fail" or smaller is None:
                raise _out_of_memory(number, limit.micro_batch, spec, failure, state)
            journal.note(
                OomRecovered(
                    step=number,
                    micro_batch_before=limit.micro_batch,
                    micro_batch_after=smaller.micro_batch,
                    message=f"{failure} ({state})",
                    milliseconds_lost=(time.perf_counter() - lost_since) * 1000,
                )
            )
            limit = smaller
        rate = learning_rate(
            number, peak=schedule.learning_rate, steps=plan.steps, warmup=plan.warmup_steps, decay=schedule.decay
        )
        norm = _update(optimizer, number, rate, loss, cache)
        model.zero_grad(set_to_none=True)
        journal.progress(number / plan.steps, step=number)
        lengths = [(rows.input_lengths[batch.rows], rows.target_lengths[batch.rows]) for batch in batches]
        yield StepResult(
            step=number,
            epoch=order.epoch_of(number - 1),
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            rows=sum(len(batch.rows) for batch in batches),
            input_tokens=sum(int(inputs.sum()) for inputs, _ in lengths),
            target_tokens=sum(batch.target_tokens for batch in batches),
            padded_tokens=sum(batch.input_ids.numel() + batch.labels.numel() for batch in batches),
            flops=0.0 if flops is None else sum(flops(*both) for both in lengths),
            data_wait_s=data_wait,
            micro_batch=limit.micro_batch,
        )
        model.train()  # the caller may have evaluated


def accumulate(model: PreTrainedModel, batches: Sequence[Batch], journal: Journal | None = None) -> torch.Tensor:
    """Forward and backward over the micro-batches of one step: adds to `.grad`, returns the loss (0-dim, detached).

    The loss is the sum over target tokens / all target tokens of the step: the same however its rows are cut.
    """
    tokens = sum(batch.target_tokens for batch in batches)
    loss: torch.Tensor | None = None
    for batch in batches:
        part = token_loss_sum(model, batch) / tokens
        part.backward()
        loss = part.detach() if loss is None else loss + part.detach()
        if journal is not None:
            journal.progress()
    assert loss is not None, "a step has rows"
    return loss


def token_loss_sum(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Negative log likelihood summed over the target tokens of a micro-batch (0-dim, nats), in fp32 or better."""
    device = model.device
    mask = _onto(batch.attention_mask, device) if batch.input_padded else None
    return t5_loss.token_loss_sum(model, _onto(batch.input_ids, device), mask, _onto(batch.labels, device))


def _update(optimizer: Optimizer, number: int, rate: float, loss: torch.Tensor, cache: Cache) -> torch.Tensor:
    try:
        return optimizer.step(number, rate, loss)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error).splitlines()[0][:500]
    raise OutOfMemoryInOptimizer(
        f"memory ran out in the optimizer at step {number}: {failure} ({describe(cache.device)})",
        hint="the job goes on from its newest checkpoint; a smaller memory.micro_batch leaves the optimizer more room",
    )


def _out_of_memory(number: int, micro_batch: int, spec: JobSpec, failure: str | None, state: str) -> OutOfMemory:
    if micro_batch > 1:
        hint = "memory.on_oom: recover redoes such a step in smaller micro-batches"
    else:
        hint = (
            "set memory.recompute_layers: 1, lower data.max_input_tokens and max_target_tokens, or take a smaller model"
        )
    return OutOfMemory(
        f"memory ran out in step {number} at micro-batch {micro_batch}, with up to {spec.data.max_input_tokens} input "
        f"and {spec.data.max_target_tokens} target tokens a row: {failure} ({state})",
        hint=hint,
    )


def _onto(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned, so that the copy runs while the host goes on.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
