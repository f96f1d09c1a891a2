"""One step on several ranks: is it the step of one, and what does it take?

    python -m benchmarks.scale [--ranks 2 3] [--steps 20]

*Equal*: tiny models in float64 without dropout (seq2seq and causal; all weights, and adapters) run the real loop
(`worker.training.loop.steps`, `worker.training.follow.FollowingRank`) on so many processes over gloo, and on one.
Compared are, after every step, the last of which has fewer rows than there are ranks, the summed gradient
(`ranks_max_abs_diff`), the loss and the weights. `oom_max_abs_diff`: the same where memory ran out on the last rank in
the middle of the first step (of two ranks). `sharded_max_abs_diff`: gradient and loss where ranks shard the weights of
models with five layers, of which some are recomputed, and the loss of each row in an evaluation after the last step.

*Fast*: rows per second of a T5 of 14 million weights in fp32 on 1 and 2 ranks, which share the cores of this machine,
each three times in turn (`ratio`: median of 2 ranks / median of 1), and the share of a step in which ranks exchange
something or wait for each other (`communication_share`). What GPUs would make of it is computed in
docs/scaling.md.

`offload_bit_equal`: three steps of `adamw_offload` leave the same bits as `adamw`.

JSON on the last line; exit code 1 if something is not equal (differences of at most 1e-12).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, Store

from benchmarks.command_line import parse
from benchmarks.oom_exactness import (
    LIMIT,
    ROWS,
    Facts,
    MethodName,
    OutOfMemoryAt,
    Scene,
    TaskName,
    farthest,
    gradient_of,
    weights_of,
)
from jobs.memory_plan import OptimizerName
from tests.training.contexts import as_loaded, training_context
from tests.training.forked import fork
from worker.training.context import Trainable, TrainingContext
from worker.training.follow import FollowingRank
from worker.training.journal import Journal
from worker.training.loop import steps
from worker.training.machine.out_of_memory import MemoryShortage
from worker.training.optimizers.gradients import gradient_norm
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.ranks.group import SILENT_S, RankGroup, join, share_cores
from worker.training.ranks.leader import group_of
from worker.training.ranks.ranks import Alone, Failure, Ranks, Vote
from worker.training.ranks.sharding import shard
from worker.training.ranks.shards import Shards
from worker.training.tasks.task import Limit

KEYS = (
    "cases", "sharded_max_abs_diff", "ranks_max_abs_diff", "weights_max_abs_diff", "oom_max_abs_diff",
    "offload_bit_equal", "rows_per_s", "rows_per_s_2_ranks", "ratio", "communication_share", "cores",
)  # fmt: skip
CASES: tuple[tuple[TaskName, MethodName], ...] = (
    ("seq2seq", "full"), ("seq2seq", "lora"), ("causal", "full"), ("causal", "lora"),
)  # fmt: skip
BATCH = 5
"""Of 12 rows: steps of 5, 5 and 2."""
LARGER = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 8192}
TIMED_BATCH, WARM_STEPS = 16, 3
DEEPER: dict[str, dict[str, int]] = {
    "seq2seq": {"num_layers": 3, "num_decoder_layers": 2}, "causal": {"num_hidden_layers": 5},
}  # fmt: skip
"""More layers than there are slots for."""
OUT_OF_MEMORY_AT = 40
"""Operations of a pass into which the last rank comes."""


class Members:
    """`Ranks` of processes that all run this program: what rank 0 begins it writes into the store."""

    def __init__(self, store: Store, count: int, group: RankGroup) -> None:
        self.count, self.seconds = count, 0.0
        self._store, self._group, self._begun = store, group, 0

    def join(
        self,
        trained: Sequence[nn.Parameter],
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        shards: Shards | None = None,
        resumed: Path | None = None,
    ) -> None:
        """They have joined, and begin alike."""
        if shards is not None:
            shards.join(self._group, state, self.tell)

    def begin(self, step: int, learning_rate: float, limit: Limit) -> None:
        """See `Ranks`."""
        safe = {bucket: asdict(known) for bucket, known in limit.safe.items()}
        told = {"step": step, "learning_rate": learning_rate, "micro_batch": limit.micro_batch, "safe": safe}
        self.tell(told)

    def tell(self, told: Mapping[str, object]) -> None:
        """What all others are to do; empty: nothing more."""
        self._store.set(f"told {self._begun}", json.dumps(told))
        self._begun += 1

    def vote(self, own: Failure | None, target_tokens: int, pass_s: float) -> Vote:
        """See `Ranks`."""
        began = time.perf_counter()
        vote = self._group.vote(own, target_tokens, pass_s)
        self.seconds += time.perf_counter() - began
        return vote

    def add_up(self, loss: torch.Tensor | None) -> torch.Tensor:
        """See `Ranks`."""
        began = time.perf_counter()
        loss = self._group.add_up(loss)
        self.seconds += time.perf_counter() - began
        return loss

    def check_equal(self) -> None:
        """See `Ranks`."""
        self._group.check_equal()


@dataclass
class StepSeen:
    """What a step was."""

    loss: float
    gradient: list[torch.Tensor]
    weights: list[torch.Tensor]
    """After it."""


@contextlib.contextmanager
def training(
    folder: Path,
    scene: Scene,
    optimizer: Optimizer,
    ranks: Ranks,
    journal: Journal | None = None,
    shards: Shards | None = None,
) -> Iterator[TrainingContext]:
    """What rank 0 trains with."""
    loaded = replace(as_loaded(scene.model, scene.spec, scene.task), shards=shards)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        yield training_context(
            Path(scratch), loaded, scene.data, scene.spec, optimizer,
            journal or Journal(folder / "journal.jsonl"), plan=scene.plan, ranks=ranks,
        )  # fmt: skip


def watched_optimizer(
    scene: Scene, shards: Shards | None, name: OptimizerName = "adamw"
) -> tuple[Optimizer, list[StepSeen]]:
    """That of a rank, and what it will have seen."""
    named, training = scene.model.named_parameters(), scene.spec.training

    def norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        own = gradient_norm(parameters)
        return own if shards is None else shards.norm(own)

    optimizer = make_optimizer(name, shards.updated(named) if shards else named, training, fused=True, norm=norm)
    seen: list[StepSeen] = []
    real = optimizer.step

    def step(number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        gradient = gradient_of(scene.model)
        norm = real(number, learning_rate, loss)
        if shards is not None:
            shards.share_updates()  # of every rank, once more: before its weights are looked at
        seen.append(StepSeen(float(loss), gradient, weights_of(scene.model)))
        return norm

    optimizer.step = step  # type: ignore[method-assign]  # watched
    return optimizer, seen


def run_steps(
    folder: Path,
    scene: Scene,
    ranks: Ranks,
    name: OptimizerName = "adamw",
    journal: Journal | None = None,
    shards: Shards | None = None,
) -> list[StepSeen]:
    """All steps from the beginning, as rank 0."""
    if shards is None:
        scene.begin()
    optimizer, seen = watched_optimizer(scene, shards, name)
    with training(folder, scene, optimizer, ranks, journal, shards) as context:
        state = Trainable(context.loaded, optimizer, compiled=False).state
        ranks.join(context.loaded.trained, state, torch.device("cpu"), shards)
        for _ in steps(context):
            pass
    return seen


@torch.no_grad()
def evaluated(scene: Scene) -> list[float]:
    """The loss of each row as the model is now, in evaluation mode."""
    scene.model.eval()
    alone = scene.task.limit(scene.rows, 1)
    batches = alone.batches(scene.rows, [np.array([row]) for row in range(len(scene.rows))], 0)
    return [float(batch.evaluated(scene.model).loss_sum) for batch in batches]


@dataclass(frozen=True)
class RanksCase:
    """What ranks do."""

    count: int
    task: TaskName = "seq2seq"
    method: MethodName = "full"
    out_of_memory_at: int = 0
    timed: int = 0
    sharded: bool = False
    recompute: int = 0
    steps_short: int = 0

    def scene(self, folder: Path) -> Scene:
        """Rows, and the model that all ranks begin with."""
        if self.timed:
            rows = self.timed * TIMED_BATCH
            return Scene(folder, dropout=0.0, dtype=torch.float32, batch_size=TIMED_BATCH, rows=rows, larger=LARGER)
        scene = Scene(
            folder, dropout=0.0, dtype=torch.float64, method=self.method, task=self.task, batch_size=BATCH,
            larger=DEEPER[self.task] if self.sharded else None, rows=BATCH * self.steps_short or ROWS,
        )  # fmt: skip
        if self.recompute:
            scene.model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=self.recompute)
        return scene


def be_rank(
    case: RanksCase, rank: int, folder: Path, scene: Scene, alone: list[StepSeen], expected: list[float]
) -> None:
    """One process; that of rank 0 prints what all found. `alone`, `expected`: steps and evaluation without others."""
    gc.freeze()  # when memory runs out, only what this process has made is looked through
    own_folder, device = folder / str(rank), torch.device("cpu")
    own_folder.mkdir()
    share_cores(device, case.count)
    store = FileStore(str(folder / "store"), case.count)
    join(store, rank, case.count, device)
    trained = [parameter for parameter in scene.model.parameters() if parameter.requires_grad]
    scene.begin()
    shards = None
    if case.sharded:
        whole = shard(scene.model, case.count, trained=case.method == "full")
        shards = Shards(scene.model, whole, rank, device)
    group = group_of(trained, shards, SILENT_S)
    if rank:
        at = case.out_of_memory_at if rank == case.count - 1 else 0
        seen = follow(scene, store, group, own_folder, at, shards, every_step=case.steps_short > 0)
        found: dict[str, float] = {} if case.timed else compared(alone, seen, own_places(scene, shards))
        found.pop("loss", None)  # nobody sees it: of a rank without rows it is rounded to fp32
    else:
        members = Members(store, case.count, group)
        if case.timed:
            found = timed_steps(own_folder, scene, members)
        else:
            facts = Facts(own_folder / "facts.jsonl")
            seen = run_steps(own_folder, scene, members, journal=facts, shards=shards)
            found = compared(alone, seen, own_places(scene, shards))
            apart = max(abs(one - other) for one, other in zip(expected, evaluated(scene), strict=True))
            found |= {"evaluation": apart, "redone": len(facts.facts)}
        members.tell({})
        members.check_equal()
    every = group.each(found)
    if not rank:
        print(json.dumps({name: max(each.get(name, 0.0) for each in every) for name in found}))
    dist.barrier()
    dist.destroy_process_group()


def follow(
    scene: Scene,
    store: Store,
    group: RankGroup,
    folder: Path,
    out_of_memory_at: int,
    shards: Shards | None,
    *,
    every_step: bool,
) -> list[StepSeen]:
    """Do what rank 0 writes into the store, until that is nothing; what each step was.

    Memory runs out at one operation of the first step (0: at none); with `every_step` of every step, that many
    operations later than in the step before, and as if it were in pieces: then a step is done again as it was cut.
    """
    optimizer, steps_seen = watched_optimizer(scene, shards)
    loaded = replace(as_loaded(scene.model, scene.spec, scene.task), shards=shards)
    trainable = Trainable(loaded, optimizer, compiled=False)
    if shards is not None:
        shards.join(group, trainable.state)
    journal = Journal(folder / "journal.jsonl")
    follower = FollowingRank(trainable, scene.order, scene.rows, group, journal, scene.spec.training.seed)
    number, seen = 0, set[int]()
    while told := json.loads(store.get(f"told {number}")):
        if shards is not None and "do" in told:
            shards.fetch(told["layer"])
        elif out_of_memory_at and told["step"] not in seen and (told["step"] == 1 or every_step):
            seen.add(told["step"])
            with OutOfMemoryAt(out_of_memory_at * told["step"]), in_pieces(every_step):
                follower.train(told)
        else:
            follower.train(told)
        number += 1
    group.check_equal()
    return steps_seen


@contextlib.contextmanager
def in_pieces(yes: bool) -> Iterator[None]:
    """Memory that runs out is called fragmented, which that of a CPU never is."""
    real = MemoryShortage.of

    def of(*arguments: Any, **options: Any) -> MemoryShortage | None:
        found = real(*arguments, **options)
        return None if found is None else replace(found, cause="fragmentation")

    with mock.patch.object(MemoryShortage, "of", of) if yes else contextlib.nullcontext():
        yield


def own_places(scene: Scene, shards: Shards | None) -> list[bool]:
    """Of each parameter, whether this rank has its values for good."""
    return [shards is None or shards.has(name) for name, _ in scene.model.named_parameters()]


def compared(alone: list[StepSeen], together: list[StepSeen], own: list[bool]) -> dict[str, float]:
    """Largest differences, of the rank's own weights. Weights whose gradient is nothing but rounding are left out: Adam
    makes an update of it."""
    learning = [mine and float(each.abs().max()) > LIMIT for each, mine in zip(alone[0].gradient, own, strict=True)]
    pairs = list(zip(alone, together, strict=True))
    return {
        "steps": len(together),
        "gradient": max(
            farthest(list(compress(one.gradient, own)), list(compress(other.gradient, own))) for one, other in pairs
        ),
        "loss": max(abs(one.loss - other.loss) for one, other in pairs),
        "weights": max(
            farthest(list(compress(one.weights, learning)), list(compress(other.weights, learning)))
            for one, other in pairs
        ),
    }


def timed_steps(folder: Path, scene: Scene, members: Members) -> dict[str, float]:
    """Rows a second, and the share of the time in which ranks exchanged something, from the third step on."""
    scene.begin()
    optimizer = make_optimizer("adamw", scene.model.named_parameters(), scene.spec.training, fused=True)
    began = rows = 0.0
    with training(folder, scene, optimizer, members) as context:
        for result in steps(context):
            if result.step == WARM_STEPS:
                began, members.seconds = time.perf_counter(), 0.0
            elif result.step > WARM_STEPS:
                rows += result.rows
    seconds = time.perf_counter() - began
    return {"rows_per_s": rows / seconds, "communication_share": members.seconds / seconds}


def together(folder: Path, case: RanksCase) -> dict[str, float]:
    """What rank 0 of so many processes found. They are forked from this one, which must compute with one thread."""
    scene = case.scene(folder)
    alone = [] if case.timed else run_steps(folder, scene, Alone())
    expected = evaluated(scene) if alone else []
    ranks = [fork(partial(be_rank, case, rank, folder, scene, alone, expected)) for rank in range(case.count)]
    ended = [rank.wait() for rank in ranks]
    failed = {rank: log for rank, (code, _, log) in enumerate(ended) if code}
    assert not failed, f"{case}: these ranks failed:\n" + "\n".join(f"{rank}: {log}" for rank, log in failed.items())
    found: dict[str, float] = json.loads(ended[0][1].splitlines()[-1])
    return found


def equality(ranks: Sequence[int], cases: Sequence[tuple[TaskName, MethodName]]) -> dict[str, float]:
    """The largest difference of any of these cases."""
    found: list[dict[str, float]] = []
    redone: list[dict[str, float]] = []
    for count in ranks:
        for task, method in cases:
            with tempfile.TemporaryDirectory() as folder:
                found.append(together(Path(folder), RanksCase(count, task, method)))
            if BATCH // count < 2:
                continue  # the last rank has one row, of which nothing smaller can be made
            with tempfile.TemporaryDirectory() as folder:
                redone.append(together(Path(folder), RanksCase(count, task, method, out_of_memory_at=OUT_OF_MEMORY_AT)))
    assert all(case["redone"] == 1 for case in redone) and not any(case["redone"] for case in found)
    sharded = []
    for count, (recompute, (task, method)) in itertools.product(ranks, enumerate(cases)):
        with tempfile.TemporaryDirectory() as folder:
            sharded.append(together(Path(folder), RanksCase(count, task, method, sharded=True, recompute=recompute)))
    return {
        "cases": len(found) + len(redone) + len(sharded),
        "sharded_max_abs_diff": max(max(case["gradient"], case["loss"], case["evaluation"]) for case in sharded),
        "ranks_max_abs_diff": max(max(case["gradient"], case["loss"]) for case in found),
        "weights_max_abs_diff": max(case["weights"] for case in found),
        "oom_max_abs_diff": max(max(case["gradient"], case["loss"], case["weights"]) for case in redone),
    }


def offload_is_bit_equal() -> bool:
    """Whether `adamw_offload` leaves the same bits as `adamw`."""
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), dropout=0.0, dtype=torch.bfloat16, batch_size=BATCH)
        one, other = (run_steps(Path(folder), scene, Alone(), name)[-1].weights for name in ("adamw", "adamw_offload"))
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def speed(timed: int, rounds: int) -> dict[str, float]:
    """1 and 2 ranks in turn."""
    seen: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for count, measured in seen.items():
            with tempfile.TemporaryDirectory() as folder:
                measured.append(together(Path(folder), RanksCase(count, timed=timed)))
    one, two = (statistics.median(each["rows_per_s"] for each in measured) for measured in seen.values())
    return {
        "rows_per_s": round(one, 2),
        "rows_per_s_2_ranks": round(two, 2),
        "ratio": round(two / one, 3),
        "communication_share": round(statistics.median(each["communication_share"] for each in seen[2]), 3),
    }


def main(argv: list[str]) -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=20, help="of which speed is measured")
    parser.add_argument("--rounds", type=int, default=3, help="of that")
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many tasks and methods")
    arguments = parse(parser, argv, ranks=[2], steps=WARM_STEPS + 1, rounds=1, cases=1)
    torch.set_num_threads(1)  # of those that are forked, each takes its share of the cores
    found = {
        **equality(arguments.ranks, CASES[: arguments.cases]), "offload_bit_equal": offload_is_bit_equal(), 
        **speed(arguments.steps, arguments.rounds),
        "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    print(json.dumps(found))
    differences = [
        found[name]
        for name in ("ranks_max_abs_diff", "weights_max_abs_diff", "oom_max_abs_diff", "sharded_max_abs_diff")
    ]
    return 0 if max(differences) <= LIMIT and found["offload_bit_equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
