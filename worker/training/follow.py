"""Every rank but the first: `python -m worker.training follow RUN_DIR --attempt N --rank R`, started by rank 0.

It loads what rank 0 loads, gets its weights and states, and from then on does what the lines on its stdin say: a pass
over its share of a step, and the same update. It neither evaluates nor saves, and ends when its stdin is closed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

from jobs.disk.rundir import RunDir
from jobs.plan import Plan
from worker.training import start
from worker.training.context import Trainable, load_trainable, order_of
from worker.training.dataset.data import Rows
from worker.training.journal import Journal, StopSignal
from worker.training.loop import one_pass, update
from worker.training.machine.device import hold_device
from worker.training.machine.numerics import prepare_device
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.machine.usage import Cache
from worker.training.memory import hard_limit
from worker.training.memory.recovery import Pass, release_memory
from worker.training.network import guards
from worker.training.optimizers.loss_scaling import LossScaling
from worker.training.ranks.group import RankGroup, join, leave, share_cores
from worker.training.ranks.leader import JOIN, LOOK_S, agree
from worker.training.ranks.ranks import share
from worker.training.settings import TrainerSettings
from worker.training.steps.order import StepOrder
from worker.training.steps.randomness import seed_step
from worker.training.steps.shape import SafeSize


def follow(run: RunDir, settings: TrainerSettings, journal: Journal, stop: StopSignal, rank: int) -> int:
    """Do what rank 0 says, until it says no more; returns the exit code. `stop`: only rank 0 is asked to."""
    told = json.loads(sys.stdin.readline())
    spec, plan, count = run.spec(), Plan.model_validate(told["plan"]), int(told["count"])
    device = torch.device(settings.device)
    guards.check_device(device)
    prepare_device(device)
    share_cores(device, count)
    limit = hard_limit.limit_of(spec.memory, settings.test_memory_limit)
    with contextlib.ExitStack() as held:
        held.enter_context(hold_device(run, device, journal, stop, shared=False))
        held.enter_context(hard_limit.on_gpu(device, limit))
        if device.type == "cuda" and plan.memory is not None:
            monitor = ProcessMonitor.of(device)
            wait = partial(start.wait, monitor, journal=journal, stop=stop)
            start.make_room(spec, plan.memory, start.gpu_now(device, monitor), wait)
        with start.loading(run):
            folder, data = start.open_stores(run, plan, journal, weights=True)
            seed_step(spec.training.seed, 0)
            trainable = load_trainable(spec, plan, folder, device, journal)
        loaded, rows = trainable.loaded, data.train
        held.enter_context(hard_limit.on_host(device, limit, loaded, trainable.optimizer, rows))
        store = FileStore(told["store"], count)
        store.set(f"ready {rank}", "yes")
        while not store.check([JOIN]):  # rank 0 may have a checkpoint to read; where it ends, this process does
            with contextlib.suppress(RuntimeError):
                store.wait([JOIN], timedelta(seconds=LOOK_S))
        join(store, rank, count, device)
        group = RankGroup(loaded.trained, float(told["silent_s"]))
        agree(group, trainable.state)
        trainable.optimizer.load_state_dict(trainable.optimizer.state_dict())  # it may have more to do with them
        guards.check_not_copied(loaded.model, loaded.pointers)
        order = order_of(spec, plan, data, loaded.task)
        follower = FollowingRank(trainable, order, rows, group, journal, spec.training.seed)
        loaded.model.train()
        for line in sys.stdin:
            match (what := json.loads(line))["do"]:
                case "pass":
                    follower.train(what)
                case "check":
                    group.check_equal()
                case _:
                    raise AssertionError(f"rank 0 says {line}")
        leave()
    return 0


@dataclass(frozen=True)
class FollowingRank:
    """A rank that has joined."""

    trainable: Trainable
    order: StepOrder
    rows: Rows
    group: RankGroup
    journal: Journal
    seed: int

    def train(self, what: Mapping[str, Any]) -> None:
        """A pass over the share of a step that this rank has, and the update, if no rank ran out of memory."""
        loaded, optimizer, group = self.trainable.loaded, self.trainable.optimizer, self.group
        model, device, number = loaded.model, loaded.model.device, int(what["step"])
        safe = {bucket: SafeSize(**known) for bucket, known in what["safe"].items()}
        limit = loaded.task.limit(self.rows, what["micro_batch"], safe)
        groups = self.order.groups_of(number - 1)
        going = Pass(number, share(groups, group.rank, group.count), time.perf_counter())
        scaling = optimizer if isinstance(optimizer, LossScaling) else None
        failure = one_pass(loaded, self.rows, limit, going, self.seed, scaling, self.journal, rank=group.rank)
        vote = group.vote(failure, going.target_tokens, time.perf_counter() - going.began)
        if vote.failure is not None:
            model.zero_grad(set_to_none=True)
            release_memory(Cache(device))
            return
        loss = group.add_up(going.loss)
        update(optimizer, number, what["learning_rate"], loss, device)
        model.zero_grad(set_to_none=True)
        self.journal.progress(step=number)
