"""What the training loop asks of the ranks of an attempt, and the attempt that has one rank only.

    rank 0: the trainer                                 rank 1, 2, …: followers
    rows of the step ── each takes its share ─────────────────────┐
    forward, backward                                   forward, backward
    did memory suffice everywhere? ═══════════════════════════════╡ else all do the step again, in smaller micro-batches
    sum of the gradients ═════════════════════════════════════════╡
    update                                              update: the same numbers, so the same weights

Only rank 0 has metrics and checkpoints, evaluates, and is asked to stop. The others do what it tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from worker.training.dataset.data import Int64
from worker.training.machine.out_of_memory import MemoryShortage
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.task import Limit


@dataclass(frozen=True)
class Failure:
    """A pass for which one rank had too little memory."""

    rank: int
    shortage: MemoryShortage
    shape: MicroBatchShape
    """Of the micro-batch that was in the model."""


@dataclass(frozen=True)
class Vote:
    """How a pass went."""

    failure: Failure | None
    """The first of any rank; None: it went well everywhere."""
    target_tokens: int
    """Of all ranks."""


class Ranks(Protocol):
    """Those of an attempt, as rank 0 sees them."""

    @property
    def count(self) -> int:
        """How many there are."""

    def join(self, trained: Sequence[nn.Parameter], state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Wait until every rank has loaded the model, and give all of them `state`: weights and optimizer states.

        `trained`: the parameters whose gradients are added up. Raises what ended another rank meanwhile.
        """

    def begin(self, step: int, learning_rate: float, limit: Limit) -> None:
        """The others begin a pass over their shares of the rows of this step, and update if it goes well everywhere."""

    def vote(self, own: Failure | None, target_tokens: int, pass_s: float) -> Vote:
        """Once a pass has ended, well or not, after so many seconds. `target_tokens`: of the rank's own share."""

    def add_up(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Turn the gradients of the mean loss of each share into those of the step, everywhere; returns its loss.

        `loss` (0-dim) is that of the rank's own share; None: it has no rows.
        """

    def check_equal(self) -> None:
        """Raise RankLost (`ranks_differ`) unless every rank has the same weights, bit for bit."""


class Alone:
    """`Ranks` of one process."""

    count = 1

    def join(self, trained: Sequence[nn.Parameter], state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Nobody to wait for."""

    def begin(self, step: int, learning_rate: float, limit: Limit) -> None:
        """Nobody has to be told."""

    def vote(self, own: Failure | None, target_tokens: int, pass_s: float) -> Vote:
        """As it went here."""
        return Vote(own, target_tokens)

    def add_up(self, loss: torch.Tensor | None) -> torch.Tensor:
        """They are."""
        assert loss is not None, "a step has rows"
        return loss

    def check_equal(self) -> None:
        """Nobody else has any."""


def share(groups: Sequence[Int64], rank: int, count: int) -> list[Int64]:
    """The rows of these groups that a rank trains with. The rows of a group have nearly equal lengths.

    Each rank gets as many rows of a group as any other, or one more. Those that get one more take turns from group to
    group, so no rank has two rows more than another in all.
    """
    shares: list[Int64] = []
    first = 0
    for group in groups:
        own = group[(rank - first) % count :: count]
        first = (first + len(group)) % count
        if len(own):
            shares.append(own)
    return shares
