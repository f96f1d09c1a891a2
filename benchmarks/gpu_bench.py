"""What `gpu_throughput` compares: a random model, the configurations that it is put into, the rows and the clock.

Needs torch, transformers, numpy and pydantic only, as do the modules of the trainer that it imports.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from worker.training.dataset.data import Int64, Rows
from worker.training.machine.out_of_memory import is_out_of_memory
from worker.training.machine.usage import Cache, memory_use
from worker.training.steps.order import StepOrder, rounded
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.limits import cut
from worker.training.tasks.seq2seq import loss as t5_loss
from worker.training.tasks.seq2seq.batches import PairBatch, PairLimit
from worker.training.tasks.seq2seq.compiled import CompiledBlocks, compile_blocks
from worker.training.tasks.seq2seq.fused import ALL, Patch, fuse, unfuse
from worker.training.tasks.seq2seq.layout import PairFlops
from worker.training.tasks.widths import PairWidths

LARGER, SMALLER = (12, 16, 24, 32, 48, 64), (6, 5, 4, 3, 2, 1)
STATES_PER_WEIGHT = 2.03
"""Bytes of `adamw_8bit`: two states of a byte, and their scales."""
Figures = dict[str, Any]
MICRO_BATCH = 8
_HEAD_STD = 0.02


@dataclass(frozen=True)
class LadderConfiguration:
    """How the model is run."""

    name: str
    attention: Literal["eager", "sdpa"] = "sdpa"
    recompute: int = 0
    """Every n-th layer; 0: none."""
    ordered: bool = True
    """Our order and micro-batches; else random rows, `micro_batch` of them, padded to the longest."""
    patches: tuple[Patch, ...] = ()
    compiled: bool = False
    limited: bool = True
    """To the memory of the emulated GPU."""
    step_rows: int = 128
    """Rows of an optimizer step, out of which our micro-batches are cut."""
    micro_batch: int = MICRO_BATCH
    search: bool = True
    """Look for the largest micro-batch that fits, too."""


LADDER = (
    LadderConfiguration("seed: eager, recomputed", "eager", 1, ordered=False),
    LadderConfiguration("sdpa, recomputed", recompute=1, ordered=False),
    LadderConfiguration("sdpa", ordered=False),
    LadderConfiguration("+ our batches"),
    LadderConfiguration("+ gelu, norm, dropout", patches=("gelu", "norm", "dropout")),
    LadderConfiguration("+ attention, masks", patches=("gelu", "norm", "dropout", "attention")),
    LadderConfiguration("+ loss", patches=ALL),
    LadderConfiguration("+ compile", patches=ALL, compiled=True),
    LadderConfiguration("+ compile, every 2nd layer recomputed", recompute=2, patches=ALL, compiled=True),
    LadderConfiguration("whole GPU, steps of 128", patches=ALL, compiled=True, limited=False, search=False),
    LadderConfiguration(
        "whole GPU, steps of 512", patches=ALL, compiled=True, limited=False, step_rows=512, micro_batch=16,
        search=False,
    ),
    LadderConfiguration(
        "whole GPU, steps of 2048", patches=ALL, compiled=True, limited=False, step_rows=2048, micro_batch=32,
        search=False,
    ),
)  # fmt: skip
"""Each adds to the one before; those from the fourth on are ours."""
SEED, OURS = LADDER[0].name, frozenset(one.name for one in LADDER[3:])


def make_model(config: dict[str, Any], device: torch.device, seed: int = 0) -> PreTrainedModel:
    """Random, bf16, made on the device; the head is not tied, as FLAN-T5's is not."""
    torch.manual_seed(seed)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = T5ForConditionalGeneration(T5Config(**config))
            # transformers 5 ties the head of every T5 that it makes.
            head = torch.randn_like(model.lm_head.weight).mul_(_HEAD_STD)
    finally:
        torch.set_default_dtype(usual)
    model.lm_head.weight = torch.nn.Parameter(head)
    model.config.use_cache = False
    model.train()
    return model


def compile_layers(model: PreTrainedModel, backend: str) -> CompiledBlocks:
    """As the trainer compiles them. Takes minutes."""
    with recompile_limit_is_known():
        return compile_blocks(model, _Silent(), backend)  # type: ignore[arg-type]  # all that it asks of a journal


class _Silent:
    """A journal that nobody reads."""

    def phase(self, phase: str) -> None:
        """Nothing."""

    def progress(self, fraction: float | None = None) -> None:
        """Nothing."""


class recompile_limit_is_known:
    """torch 2.13's `torch.compile` takes the limit of recompilations; where it does not yet, dynamo is configured."""

    def __enter__(self) -> None:
        self._stock: Any = torch.compile
        if "recompile_limit" not in inspect.signature(self._stock).parameters:
            torch.compile = self._without_limit  # type: ignore[assignment]  # a stand-in

    def __exit__(self, *error: object) -> None:
        torch.compile = self._stock

    def _without_limit(self, *arguments: Any, recompile_limit: int, **options: Any) -> Any:
        torch._dynamo.config.recompile_limit = recompile_limit
        return self._stock(*arguments, **options)


# -- measuring -----------------------------------------------------------------------------------------------------


class TimeUp(Exception):
    """No time is left for what would have come next."""


class Bench:
    """Of one process. Rates are those of real tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        epoch: Epoch,
        *,
        dropout: float,
        budget_bytes: float | None,
        backend: str,
        seconds: float,
        micro_batches: int | None,
        largest: int,
        deadline: Callable[[], float],
    ) -> None:
        """`budget_bytes` of memory in limited configurations (CUDA). Of an epoch so many `seconds` or `micro_batches`
        are run. `deadline()` tells the seconds left.
        """
        self.model, self.epoch = model, epoch
        self.device = model.device
        self._dropout, self._budget, self._backend = dropout, budget_bytes, backend
        self._seconds, self._count, self._largest, self._left = seconds, micro_batches, largest, deadline
        self._cache = Cache(self.device)
        self._blocks: CompiledBlocks | None = None
        self._recomputed = 0
        weights = sum(parameter.numel() for parameter in model.parameters())
        # The place that an 8-bit optimizer would take.
        self._states = torch.empty(int(STATES_PER_WEIGHT * weights), dtype=torch.uint8, device=self.device)
        set_dropout(model, dropout)

    # -- one configuration -----------------------------------------------------------------------------------

    def apply(self, chosen: LadderConfiguration) -> Figures:
        """Put the model into that configuration. Compiling takes minutes the first time."""
        self._check_time()
        model = self.model
        unfuse(model, ALL)
        for module in model.modules():
            if config := getattr(module, "config", None):
                config._attn_implementation = chosen.attention
        fuse(model, chosen.patches)
        if self._recomputed:
            model.activation_checkpointing_disable()
        if chosen.recompute:
            model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=chosen.recompute)
        self._recomputed = chosen.recompute
        self._limit(chosen.limited)
        self._refresh()
        figures: Figures = {}
        if chosen.compiled and self._blocks is None:
            start = time.perf_counter()
            self._blocks = compile_layers(model, self._backend)
            self._refresh()
            figures["compile_s"] = time.perf_counter() - start
        for stack in (model.encoder, model.decoder):
            if "attention" in chosen.patches:
                stack.compiled = self._blocks if chosen.compiled else None  # type: ignore[union-attr]  # a T5FusedStack
        self.refuse_uncompiled(chosen)
        return figures

    def refuse_uncompiled(self, chosen: LadderConfiguration) -> None:
        """Raise RuntimeError if what is to be measured compiled is not."""
        if chosen.compiled and self._blocks is not None and self._blocks.failure is not None:
            raise RuntimeError(f"layers are not compiled: {self._blocks.failure}")

    def sizes(self, chosen: LadderConfiguration) -> Iterator[Figures]:
        """Micro-batches to measure: the usual one or that it does not fit, then the largest that does."""
        first = chosen.micro_batch
        largest, fits = first, self.fits(chosen, first)
        yield {"micro_batch": first} if fits else {"micro_batch": first, "out_of_memory": True}
        if not chosen.search:
            return
        if fits:
            for size in (size for size in LARGER if first < size <= self._largest):
                # Where steps hold no larger groups, a higher limit changes nothing.
                same = self._most(chosen, size) == self._most(chosen, largest)
                if same or not self.fits(chosen, size):
                    break
                largest = size
        else:
            largest = next((size for size in SMALLER if size < first and self.fits(chosen, size)), 0)
        if largest not in (0, first):
            yield {"micro_batch": largest, "largest": True}

    def fits(self, chosen: LadderConfiguration, micro_batch: int) -> bool:
        """Whether the largest micro-batch of an epoch goes through."""
        self._check_time()
        batch = self._batch(chosen, self.epoch.largest(chosen, micro_batch))
        failure = None
        try:
            self._pass(batch, chosen)
            self._wait()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        if failure is not None:  # outside of `except`, whose traceback holds the activations
            self._refresh()
        return failure is None

    def measure(self, chosen: LadderConfiguration, micro_batch: int) -> Figures:
        """Rates over a part of an epoch in its own proportions, after a warm-up with the largest micro-batch."""
        memory_use(self.device)
        if not self.fits(chosen, micro_batch):
            return {"out_of_memory": True}
        pieces = self.epoch.pieces(chosen, micro_batch)
        cost = [self.epoch.padded_flops(chosen, piece) for piece in pieces]
        some = [self._batch(chosen, piece) for piece in evenly(pieces, cost, 4)]
        failure = None
        try:
            self._timed(some[:1], chosen)
            seconds = self._timed(some[1:], chosen)
            wanted = self._count or max(8, int(self._seconds / seconds * 3))
            course = evenly(pieces, cost, min(wanted, len(pieces)))
            batches = [self._batch(chosen, piece) for piece in course]
            seconds = self._timed(batches, chosen)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)
        if failure is not None:  # the largest went through before; now memory is in pieces
            self._refresh()
            return {"out_of_memory": True}
        used = memory_use(self.device)
        rows = np.concatenate(course)
        inputs, targets = self.epoch.rows.input_lengths[rows], self.epoch.rows.target_lengths[rows]
        real = self.epoch.flops.rows(inputs, targets)
        return {
            "rows_per_s": len(rows) / seconds,
            "mean_rows_per_s": real / self.epoch.mean_flops / seconds,
            "tokens_per_s": int(inputs.sum() + targets.sum()) / seconds,
            "flops_per_s": real / seconds,
            "peak_gib": used.allocated / 2**30,
            "reserved_gib": used.reserved / 2**30,
            "waste_fraction": 1 - real / sum(self.epoch.padded_flops(chosen, piece) for piece in course),
            "rows_per_micro_batch": len(rows) / len(course),
            "micro_batches": len(course),
            "seconds": seconds,
        }

    def kernels(self, chosen: LadderConfiguration, micro_batch: int) -> Figures:
        """Of a micro-batch of median cost: kernels (on the CPU: operators) and the share of time that they run."""
        self._check_time()
        pieces = self.epoch.pieces(chosen, micro_batch)
        cost = [self.epoch.padded_flops(chosen, piece) for piece in pieces]
        batch = self._batch(chosen, evenly(pieces, cost, 1)[0])
        cuda = self.device.type == "cuda"
        seconds = self._timed([batch] * 3, chosen) / 3 if cuda else 0.0
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as record:
            self._timed([batch], chosen)
        if not cuda:
            return {"kernels": sum(event.name.startswith("aten::") for event in record.events()), "busy_fraction": None}
        events = [event for event in record.events() if event.device_type == DeviceType.CUDA]
        ran = [event for event in events if not getattr(event, "is_user_annotation", False) and _is_kernel(event.name)]
        return {
            "kernels": len(ran),
            "busy_fraction": sum(event.time_range.elapsed_us() for event in ran) / 1e6 / seconds,
        }

    def same(self, chosen: LadderConfiguration) -> Figures:
        """Loss of a target token and norm of its gradients, without dropout, of rows that are the same for all."""
        self._check_time()
        everything = self.epoch.rows
        cost = (everything.input_lengths + everything.target_lengths).tolist()
        single = list(np.arange(len(everything))[:, None])
        batch = self._batch(chosen, np.concatenate(evenly(single, cost, 4)))
        self.model.zero_grad(set_to_none=False)
        set_dropout(self.model, 0.0)
        try:
            loss = float(self._pass(batch, chosen)) / batch.target_tokens
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]).norm())
        finally:
            set_dropout(self.model, self._dropout)
        return {"loss": loss, "grad_norm": norm}

    # -- running ---------------------------------------------------------------------------------------------

    def _most(self, chosen: LadderConfiguration, micro_batch: int) -> int:
        return self.epoch.size(chosen, self.epoch.largest(chosen, micro_batch))

    def _batch(self, chosen: LadderConfiguration, piece: Int64) -> PairBatch:
        batch = self.epoch.batch(chosen, piece)
        if self.device.type != "cuda":
            return batch
        pinned = {name: getattr(batch, name).pin_memory() for name in ("input_ids", "attention_mask", "labels")}
        return replace(batch, **pinned)

    def _pass(self, batch: PairBatch, chosen: LadderConfiguration) -> torch.Tensor:
        """Forward and backward; the loss summed over target tokens. Gradients add up, as within a step."""
        ids, labels = (tensor.to(self.device, non_blocking=True) for tensor in (batch.input_ids, batch.labels))
        needed = batch.input_padded or "attention" not in chosen.patches
        mask = batch.attention_mask.to(self.device, non_blocking=True) if needed else None
        if "head" in chosen.patches:
            total = t5_loss.token_loss_sum(self.model, ids, mask, labels)
        else:  # the model's own: a mean, computed in bf16
            mean = self.model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            total = mean.float() * batch.target_tokens
        (total / batch.target_tokens).backward()
        return total.detach()

    def _timed(self, batches: Sequence[PairBatch], chosen: LadderConfiguration) -> float:
        """Seconds of these micro-batches."""
        self._check_time()
        self._wait()
        start = time.perf_counter()
        for batch in batches:
            self._pass(batch, chosen)
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _refresh(self) -> None:
        """Nothing in memory but what is there between two micro-batches of a step."""
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        self._cache.clear()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def _limit(self, limited: bool) -> None:
        if self.device.type == "cuda" and self._budget is not None:
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = min(1.0, self._budget / total) if limited else 1.0
            torch.cuda.set_per_process_memory_fraction(share)

    def _check_time(self) -> None:
        if self._left() <= 0:
            raise TimeUp


def _is_kernel(name: str) -> bool:
    # What the profiler shows on the GPU besides kernels: copies, fills, and the ranges that inductor names.
    return not name.startswith(("Memcpy", "Memset", "##", "Torch-Compiled", "ProfilerStep"))


# -- micro-batches of an epoch over given rows, as a configuration makes them ------------------------------------------


class Epoch:
    """Pieces are row numbers [B] that go through the model together."""

    def __init__(self, rows: Rows, flops: PairFlops) -> None:
        self.rows, self.flops = rows, flops
        self.mean_flops = flops.rows(rows.input_lengths, rows.target_lengths) / len(rows)
        self._pieces: dict[tuple[bool, int, int], list[Int64]] = {}

    def pieces(self, chosen: LadderConfiguration, micro_batch: int) -> list[Int64]:
        """Row numbers of every micro-batch of an epoch."""
        key = chosen.ordered, chosen.step_rows, micro_batch
        if key not in self._pieces:
            self._pieces[key] = self._ordered(chosen, micro_batch) if chosen.ordered else self._random(micro_batch)
        return self._pieces[key]

    def _random(self, micro_batch: int) -> list[Int64]:
        shuffled = np.random.default_rng(0).permutation(len(self.rows))
        return list(shuffled[: len(shuffled) // micro_batch * micro_batch].reshape(-1, micro_batch))

    def _ordered(self, chosen: LadderConfiguration, micro_batch: int) -> list[Int64]:
        order = StepOrder(PairWidths(self.rows), min(chosen.step_rows, len(self.rows)), 1, seed=0)
        limit = PairLimit.of(self.rows, micro_batch)
        steps = range(max(1, len(self.rows) // chosen.step_rows))  # the last may be short, and is left out
        return [piece for step in steps for piece in cut(self.rows, order.groups_of(step), limit)]

    def widths(self, chosen: LadderConfiguration, piece: Int64) -> tuple[int, int]:
        """To which inputs and targets are padded."""
        lengths = self.rows.input_lengths[piece], self.rows.target_lengths[piece]
        # The seed pads to the longest; the kernels of sdpa want multiples of 8, which its peers get like we do.
        inputs, targets = lengths if chosen.attention == "eager" else map(rounded, lengths)
        return int(inputs.max()), int(targets.max())

    def size(self, chosen: LadderConfiguration, piece: Int64) -> int:
        """Positions, padded."""
        return len(piece) * sum(self.widths(chosen, piece))

    def largest(self, chosen: LadderConfiguration, micro_batch: int) -> Int64:
        """The piece with the most positions."""
        return max(self.pieces(chosen, micro_batch), key=lambda piece: self.size(chosen, piece))

    def padded_flops(self, chosen: LadderConfiguration, piece: Int64) -> float:
        """Forward and backward, padding included."""
        inputs, targets = self.widths(chosen, piece)
        return self.flops.rows(np.full(len(piece), inputs), np.full(len(piece), targets))

    def batch(self, chosen: LadderConfiguration, piece: Int64) -> PairBatch:
        """What goes into the model, on the host."""
        everything = PairLimit(len(piece), 1 << 20, 1 << 20)
        (batch,) = everything.batches(self.rows, [piece], pad_id=0)
        inputs, targets = self.widths(chosen, piece)
        return replace(
            batch,
            input_ids=batch.input_ids[:, :inputs].contiguous(),
            attention_mask=batch.attention_mask[:, :inputs].contiguous(),
            labels=batch.labels[:, :targets].contiguous(),
        )


def evenly(pieces: Sequence[Int64], cost: Sequence[float], count: int) -> list[Int64]:
    """So many of the pieces, at even distances in the order of their cost, shuffled."""
    chosen = np.argsort(cost, kind="stable")[((np.arange(count) + 0.5) * len(pieces) / count).astype(int)]
    if count > 4:
        chosen = np.random.default_rng(0).permutation(chosen)
    return [pieces[number] for number in chosen]
