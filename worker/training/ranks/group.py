"""What ranks exchange: votes, gradients, state. Collective: every rank of the group calls the same, in the same order.

Votes and objects go over gloo, through the host; gradients as they lie: over NCCL between GPUs, else over gloo.

Over gloo a rank that has died, or does not answer in time, is an error of the call in which the others wait for it.
NCCL finds out later, beside the host, and then ends the process.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Store

from jobs.errors import GpuLost, OutOfMemoryInOptimizer, RankLost, StageError
from jobs.text.units import format_duration
from worker.training.machine.device import POLL_S
from worker.training.machine.out_of_memory import KINDS, is_out_of_memory
from worker.training.ranks.ranks import Failure, Vote

PIECE = 2**23
"""Numbers of gradients that are added up at once: 32 MiB in fp32."""
TEST_GLOO = "LONGHAUL_TEST_GLOO"
"""Tests alone: GPUs exchange gradients over gloo, for a simulated GPU has no NCCL."""
DIFFERENT = "ranks_differ"
REACH_S = 120.0
"""How long GPUs may take to exchange something for the first time."""
FIRST_PASS = timedelta(minutes=15)
"""How long ranks wait for each other in the first pass, whose length nobody knows."""
SILENT_S, SLOWER = 120.0, 20
"""From then on so long, but at least so many times as long as the longest pass."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""All ranks are on one machine; nothing listens beyond it. They meet through a file (`dist.FileStore`)."""


def devices_of_ranks(count: int, device: torch.device) -> list[str]:
    """What each of so many ranks trains on, as CUDA_VISIBLE_DEVICES names a GPU; the CPU is empty.

    Of several GPUs this process, which becomes rank 0, sees the first alone from then on: whatever looks at all GPUs,
    such as the states of their generators, takes memory of each. Call it before CUDA is used. Raises GpuLost if there
    are fewer.
    """
    if device.type != "cuda":
        return [""] * count
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if visible is None else visible.split(",")
    if len(names) < count:
        raise GpuLost(f"the job is for {count} GPUs, and the trainer sees {len(names)}")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[0]
    return names[:count]


def share_cores(device: torch.device, count: int) -> None:
    """Ranks on a CPU divide its cores among themselves."""
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // count))


def join(store: Store, rank: int, count: int, device: torch.device) -> None:
    """Become this rank of `count`. Returns when all have joined, and GPUs have exchanged something. Raises RankLost."""
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    over_host = device.type == "cpu" or bool(os.environ.get(TEST_GLOO))
    dist.init_process_group(
        "gloo" if over_host else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=count,
        timeout=FIRST_PASS,
    )
    if not over_host:
        reach(device)


def reach(device: torch.device) -> None:
    """Every kind of exchange between the GPUs once. NCCL connects them, and takes its memory, when it first makes one:
    here that fails with a cause, and before torch's allocator has the rest of the memory. Raises RankLost.
    """
    numbers = [torch.zeros(PIECE, device=device), torch.zeros(1, dtype=torch.float64, device=device)]
    for each in numbers:
        dist.all_reduce(each)
        dist.broadcast(each, src=0)
    done, until = torch.cuda.Event(), time.monotonic() + REACH_S
    done.record()
    while not done.query():
        if time.monotonic() > until:
            raise RankLost(
                f"the GPUs of this attempt cannot reach each other: nothing came in {format_duration(REACH_S)}",
                hint="set NCCL_P2P_DISABLE=1 in the environment of the train worker (docs/gpus.md): they then exchange "
                "data through the host",
            )
        time.sleep(POLL_S)


def leave(*, at_once: bool = False) -> None:
    """Leave the group, if this process has joined one. `at_once`: without waiting for exchanges that have begun, in
    which others may never take part."""
    if not dist.is_initialized():
        return
    if at_once:
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


class RankGroup:
    """The ranks of an attempt, as one of them sees them, once it has joined."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        silent_s: float = SILENT_S,
        why_lost: Callable[[str], StageError | None] = lambda failure: None,
    ) -> None:
        """`parameters`: those that are trained. `why_lost`: what is known of the others when a call has failed."""
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._parameters = parameters
        self._why_lost, self._silent_s = why_lost, silent_s
        self._slowest = 0.0
        """Seconds of the longest pass so far."""
        # Made once: memory for it cannot run out in the middle of a step.
        kinds = [torch.float32, *(parameter.dtype for parameter in parameters)]
        self._buffer = torch.empty(
            min(PIECE, sum(parameter.numel() for parameter in parameters)),
            dtype=functools.reduce(torch.promote_types, kinds),
            device=parameters[0].device,
        )
        self._weight = 0.0
        self._has_gradient = [False] * len(parameters)

    def vote(self, own: Failure | None, target_tokens: int, pass_s: float) -> Vote:
        """See `Ranks.vote`. A rank that ran out of memory waits for those that did not."""
        gradients = [parameter.grad is not None for parameter in self._parameters]
        votes = torch.tensor([own is not None, target_tokens, *gradients], dtype=torch.int64)
        self._collective(dist.all_reduce, votes)
        failures, tokens, *with_gradient = votes.tolist()
        self._weight = target_tokens / tokens if tokens else 0.0
        self._has_gradient = [number > 0 for number in with_gradient]
        if not failures:
            if pass_s > self._slowest:
                self._slowest = pass_s
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=max(self._silent_s, SLOWER * pass_s)))
            return Vote(None, tokens)
        all_failures: list[Failure | None] = [None] * self.count
        told = None if own is None else replace(own, shortage=replace(own.shortage, snapshot=None))
        self._collective(dist.all_gather_object, all_failures, told)
        return Vote(own or next(failure for failure in all_failures if failure is not None), tokens)

    @torch.no_grad()
    def add_up(self, loss: torch.Tensor | None) -> torch.Tensor:
        """See `Ranks.add_up`. Added in fp32 at least; each sum is rounded to the type of the gradient once."""
        for pieces in batched([parameter.grad for parameter in self._summed() if parameter.grad is not None]):
            sizes = [len(piece) for piece in pieces]
            flat = self._buffer[: sum(sizes)]
            torch._foreach_copy_(list(flat.split(sizes)), pieces)
            flat.mul_(self._weight)
            self._collective(dist.all_reduce, flat)
            torch._foreach_copy_(pieces, list(flat.split(sizes)))
        own = torch.zeros((), dtype=torch.float32, device=self._buffer.device) if loss is None else loss
        total = own.double() * self._weight
        self._collective(dist.all_reduce, total)
        return total.to(own.dtype)

    @torch.no_grad()
    def share_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these tensors of rank 0 to all others."""
        for name in sorted(tensors):
            self._collective(dist.broadcast, tensors[name].detach(), src=0)

    @torch.no_grad()
    def check_equal(self) -> None:
        """See `Ranks.check_equal`: compared by sums of their bits."""
        own = torch.stack([bits(parameter).sum(dtype=torch.int64) for parameter in self._parameters]).cpu()
        least, most = own.clone(), own.clone()
        self._collective(dist.all_reduce, least, op=dist.ReduceOp.MIN)
        self._collective(dist.all_reduce, most, op=dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            raise RankLost(
                "the ranks of this attempt have different weights",
                code=DIFFERENT,
                hint="their GPUs must be of one kind; if they are, look for faulty memory "
                "(`nvidia-smi -q -d ECC`); the job resumes from its newest checkpoint, a limited number of times",
            )

    def _summed(self) -> list[nn.Parameter]:
        """The parameters that have a gradient on any rank; where they have none here, zeros."""
        summed = [parameter for parameter, has in zip(self._parameters, self._has_gradient, strict=True) if has]
        try:
            for parameter in summed:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        except KINDS as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryInOptimizer(f"memory ran out before the gradients were added up: {error}") from error
        return summed

    def _collective(self, call: Callable[..., object], *arguments: object, **more: object) -> None:
        try:
            call(*arguments, **more)
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> StageError:
        failure = (str(error).splitlines() or [type(error).__name__])[0][:300]
        return self._why_lost(failure) or RankLost(f"rank {self.rank} cannot exchange data with the others: {failure}")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def batched(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Flat views of them, in lists that have at most `PIECE` numbers each."""
    pieces: list[torch.Tensor] = []
    room = PIECE
    for gradient in gradients:
        for piece in gradient.view(-1).split(PIECE):
            if len(piece) > room:
                yield pieces
                pieces, room = [], PIECE
            pieces.append(piece)
            room -= len(piece)
    if pieces:
        yield pieces
