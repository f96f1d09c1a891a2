"""The training loop: a generator that yields one `StepResult` per optimizer step (design §3, §9).

Its caller reacts to each: logs, evaluates, saves, stops. Nothing here waits for the device (of the optimizers, `adamw`
does not either), so that on CUDA the host runs ahead; losses stay tensors until somebody needs the number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from jobs.errors import OutOfMemory, OutOfMemoryInOptimizer
from jobs.events import OomRecovered
from jobs.plan import Plan
from jobs.spec import JobSpec
from worker.training.batches import IGNORED, Batch, StepOrder, micro_batches
from worker.training.data import Int64, Rows
from worker.training.journal import Journal
from worker.training.memory import Cache, describe, is_out_of_memory
from worker.training.optimizer import Optimizer
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
    target_tokens: int
    data_wait_s: float
    micro_batch: int
    """Rows of a micro-batch from now on."""


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
    rank: int = 0,
) -> Iterator[StepResult]:
    """Steps `after` + 1 to the last, in order.

    Memory that runs out inside a step costs time only: its gradients are dropped and the same step is redone from its
    rows in micro-batches of half the size, with the same seed; the smaller size is kept.

    Raises NonFinite (the weights are those before the bad step), OutOfMemory (at micro-batch 1, or when the job says
    `on_oom: fail`), OutOfMemoryInOptimizer (then nothing may be repeated: some weights may be updated, others not).
    """
    schedule = spec.schedule
    model.train()
    for number in range(after + 1, plan.steps + 1):
        chosen = order.rows_of(number - 1)
        while True:
            lost_since, failure = time.perf_counter(), None
            try:
                seed_step(schedule.seed, number, rank)
                gradients = accumulate(model, rows, chosen, micro_batch, pad_id, journal)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error).splitlines()[0][:500]
            # Outside the `except`: inside, the traceback would keep the activations of the failed pass alive.
            state = describe(cache.device)
            model.zero_grad(set_to_none=True)
            cache.clear()
            if spec.memory.on_oom == "fail" or micro_batch == 1:
                raise _out_of_memory(number, micro_batch, spec, failure, state)
            smaller = max(1, min(micro_batch, len(chosen)) // 2)
            journal.note(
                OomRecovered(
                    step=number,
                    micro_batch_before=micro_batch,
                    micro_batch_after=smaller,
                    message=f"{failure} ({state})",
                    milliseconds_lost=(time.perf_counter() - lost_since) * 1000,
                )
            )
            micro_batch = smaller
        rate = learning_rate(
            number, peak=schedule.learning_rate, steps=plan.steps, warmup=plan.warmup_steps, decay=schedule.decay
        )
        norm = _update(optimizer, number, rate, gradients.loss, cache)
        model.zero_grad(set_to_none=True)
        journal.progress(number / plan.steps, step=number)
        yield StepResult(
            step=number,
            epoch=order.epoch_of(number - 1),
            loss=gradients.loss,
            grad_norm=norm,
            learning_rate=rate,
            rows=len(chosen),
            target_tokens=gradients.target_tokens,
            data_wait_s=gradients.data_wait_s,
            micro_batch=micro_batch,
        )
        model.train()  # the caller may have evaluated


@dataclass(frozen=True)
class Gradients:
    """What `accumulate` leaves besides the `.grad` of the parameters."""

    loss: torch.Tensor
    target_tokens: int
    data_wait_s: float


def accumulate(
    model: PreTrainedModel, rows: Rows, chosen: Int64, size: int, pad_id: int, journal: Journal | None = None
) -> Gradients:
    """Forward and backward over the rows of one step, in micro-batches of at most `size` rows.

    The loss is the sum over target tokens / all target tokens of the step: the same however the rows are cut.
    """
    start = time.perf_counter()
    batches: Sequence[Batch] = micro_batches(rows, chosen, size, pad_id)
    data_wait = time.perf_counter() - start
    tokens = sum(batch.target_tokens for batch in batches)
    loss: torch.Tensor | None = None
    for batch in batches:
        part = token_loss_sum(model, batch) / tokens
        part.backward()
        loss = part.detach() if loss is None else loss + part.detach()
        if journal is not None:
            journal.progress()
    assert loss is not None, "a step has rows"
    return Gradients(loss=loss, target_tokens=tokens, data_wait_s=data_wait)


def token_loss_sum(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Negative log likelihood summed over the target tokens of a micro-batch (0-dim, nats), in fp32 or better.

    The model's own loss would be a mean, computed in bf16.
    """
    device = model.device
    labels = _onto(batch.labels, device)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]
    logits: torch.Tensor = model(
        input_ids=_onto(batch.input_ids, device),
        attention_mask=_onto(batch.attention_mask, device),
        decoder_input_ids=shifted,
        use_cache=False,
    ).logits
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


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
