"""The training loop: a generator that yields one `StepResult` per optimizer step (design §3, §9).

Its caller reacts to each: logs, evaluates, saves, stops. Nothing here waits for the device (of the optimizers, `adamw`
does not either), so that on CUDA the host runs ahead; losses stay tensors until somebody needs the number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from jobs.errors import OutOfMemoryInOptimizer
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training.dataset.data import Int32, Rows
from worker.training.journal import Journal
from worker.training.machine.out_of_memory import KINDS, Neighbours, Shortage
from worker.training.machine.usage import Cache
from worker.training.memory.evidence import Evidence
from worker.training.memory.recovery import Pass, Recovery
from worker.training.network import t5_loss
from worker.training.optimizers.optimizer import Optimizer
from worker.training.steps.batches import Batch, micro_batches
from worker.training.steps.limits import Limit, SafeSize
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.steps.schedule import learning_rate
from worker.training.stop import Stop


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
    """Rows of the longest shape in a micro-batch: the least of the step's length buckets."""
    largest: tuple[int, int, int]
    """Rows, input and target tokens of the largest micro-batch, padding included."""
    safe: Mapping[str, SafeSize] = field(default_factory=dict)
    """What memory has taught so far, by length bucket: from where the next step goes on."""


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
    safe: Mapping[str, SafeSize] | None = None,
    flops: Callable[[Int32, Int32], float] | None = None,
    neighbours: Neighbours | None = None,
    stop: Stop | None = None,
    evidence: Evidence | None = None,
    rank: int = 0,
) -> Iterator[StepResult]:
    """Steps `after` + 1 to the last, in order. `flops` counts those of rows of so many input and target tokens.

    Memory that runs out inside a step costs time only: its gradients are dropped and the same step is redone from its
    rows with the same seed, where nothing else helps (`recovery.Recovery`) in smaller micro-batches of that length
    bucket. `safe` says where an earlier attempt stood in that, `evidence` where to write down what happened.
    `neighbours` knows who else is on the card, and needs `stop` for its waits; None on a CPU.

    Raises NonFinite (the weights are those before the bad step), OutOfMemory (at one row, or when the job says
    `on_oom: fail`), OutOfMemoryInOptimizer (then nothing may be repeated: some weights may be updated, others not),
    StopAsked in a wait (the weights are those of the step before).
    """
    schedule, device = spec.schedule, cache.device
    limit = Limit.of(rows, micro_batch, safe)
    recovery = Recovery(model, rows, cache, journal, spec, plan, neighbours, stop, evidence)
    model.train()
    for number in range(after + 1, plan.steps + 1):
        start = time.perf_counter()
        if opens_epoch(order, number):
            limit = limit.regrown()
        groups = order.groups_of(number - 1)
        data_wait = time.perf_counter() - start
        while True:
            going = Pass(number, groups, began=time.perf_counter())
            try:
                going.batches = batches = micro_batches(rows, groups, limit, pad_id)
                data_wait += time.perf_counter() - going.began
                seed_step(schedule.seed, number, rank)
                loss = accumulate(model, batches, journal, going)
                break
            except KINDS as error:
                shortage = Shortage.of(error, device, details=evidence is not None and evidence.wanted())
                if shortage is None:
                    raise
            # Outside the `except`: inside, the traceback would keep the activations of the failed pass alive.
            limit = recovery.again(shortage, going, limit)
            del shortage  # its snapshot can be large
        rate = learning_rate(
            number, peak=schedule.learning_rate, steps=plan.steps, warmup=plan.warmup_steps, decay=schedule.decay
        )
        norm = _update(optimizer, number, rate, loss, device)
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
            micro_batch=min(limit.size(batch.shape.bucket) for batch in batches),
            largest=max(((*batch.input_ids.shape, batch.labels.shape[1]) for batch in batches), key=positions),
            safe=limit.safe,
        )
        model.train()  # the caller may have evaluated


def opens_epoch(order: StepOrder, number: int) -> bool:
    """Whether step `number` (from 1) is the first that begins in a new epoch; the first of a run is not."""
    done, before = (order.epoch_of(count - 1) if count > 0 else 0.0 for count in (number - 1, number - 2))
    return int(done) > int(before)


def accumulate(
    model: PreTrainedModel, batches: Sequence[Batch], journal: Journal | None = None, going: Pass | None = None
) -> torch.Tensor:
    """Forward and backward over the micro-batches of one step: adds to `.grad`, returns the loss (0-dim, detached).

    The loss is the sum over target tokens / all target tokens of the step: the same however its rows are cut.
    `going` is told which of them is in the model.
    """
    tokens = sum(batch.target_tokens for batch in batches)
    loss: torch.Tensor | None = None
    for number, batch in enumerate(batches):
        if going is not None:
            going.at = number
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


def _update(optimizer: Optimizer, number: int, rate: float, loss: torch.Tensor, device: torch.device) -> torch.Tensor:
    try:
        return optimizer.step(number, rate, loss)
    except KINDS as error:
        shortage = Shortage.of(error, device)
        if shortage is None:
            raise
    raise OutOfMemoryInOptimizer(
        f"memory ran out in the optimizer at step {number}: {shortage.text}",
        hint="the job goes on from its newest checkpoint; a smaller memory.micro_batch leaves the optimizer more room",
    )


def positions(shape: tuple[int, int, int]) -> int:
    """Of a micro-batch of so many rows, input and target tokens."""
    rows, inputs, targets = shape
    return rows * (inputs + targets)


def _onto(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned, so that the copy runs while the host goes on.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
