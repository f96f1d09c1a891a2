"""A step on several ranks is the step of one: loss, gradients and weights, also where memory runs out on one of them.

`benchmarks.scale` runs the same with two and three ranks on every task and method.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.oom_exactness import LIMIT, MethodName, TaskName
from benchmarks.scale import RanksCase, together
from jobs.errors import RankLost
from worker.training.ranks import group
from worker.training.ranks.ranks import share


@pytest.mark.parametrize(
    ("count", "task", "method"),
    [(3, "seq2seq", "full"), (2, "causal", "full"), (2, "seq2seq", "lora"), (3, "causal", "lora")],
)
def test_loss_gradients_and_weights_are_those_of_one_rank(
    tmp_path: Path, count: int, task: TaskName, method: MethodName
) -> None:
    found = together(tmp_path, RanksCase(count, task, method))
    assert found.pop("steps") == 3, "the last of them has two rows, fewer than three ranks"
    assert found.pop("redone") == 0
    assert max(found.values()) <= LIMIT


def test_memory_that_runs_out_on_one_rank_costs_a_pass_of_all_and_changes_nothing(tmp_path: Path) -> None:
    found = together(tmp_path, RanksCase(2, out_of_memory_at=40))
    assert found.pop("redone") == 1
    assert found.pop("steps") == 3
    assert max(found.values()) <= LIMIT


@pytest.mark.parametrize("answers", [True, False])
def test_gpus_that_cannot_reach_each_other_are_said_to_be_so_and_nobody_waits_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """With a group of one over gloo, and events of a GPU that come or do not."""
    event = SimpleNamespace(record=lambda: None, query=lambda: answers)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(group, "REACH_S", 0.05)
    group.join(FileStore(str(tmp_path / "store"), 1), 0, 1, torch.device("cpu"))
    with contextlib.nullcontext() if answers else pytest.raises(RankLost, match="cannot reach each other") as caught:
        group.reach(torch.device("cpu"))
    assert answers or (caught is not None and "NCCL_P2P_DISABLE=1" in (caught.value.hint or ""))
    group.leave(at_once=True)
    assert not dist.is_initialized()
    group.leave()


def test_ranks_share_rows_evenly_and_lose_none() -> None:
    draw = np.random.default_rng(0)
    for count in (1, 2, 3, 8):
        for sizes in ([5, 4, 3, 1, 1], [1] * 7, [64], [2, 2]):
            edges = np.cumsum([0, *sizes])
            rows = draw.permutation(edges[-1])
            groups = [rows[begin:end] for begin, end in pairwise(edges)]
            shares = [share(groups, rank, count) for rank in range(count)]
            assert sorted(np.concatenate([group for each in shares for group in each])) == sorted(rows)
            held = [sum(map(len, each)) for each in shares]
            assert max(held) - min(held) <= 1
            assert all(len(group) for each in shares for group in each)
