"""One step on several ranks: is it the step of one, and what does it take?

    python -m benchmarks.scale [--ranks 2 3] [--steps 20]

*Equal*: tiny models in float64 without dropout (seq2seq and causal; all weights, and adapters) run the real loop
(`worker.training.loop.steps`, `worker.training.follow.FollowingRank`) on so many processes over gloo, and on one.
Compared are, after every step, the last of which has fewer rows than there are ranks, the summed gradient
(`ranks_max_abs_diff`), the loss and the weights. `oom_max_abs_diff`: the same where memory ran out on the last rank in
the middle of the first step (of two ranks).

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
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

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
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.ranks.group import SILENT_S, RankGroup, join, share_cores
from worker.training.ranks.ranks import Alone, Failure, Ranks, Vote
from worker.training.tasks.task import Limit

KEYS = (
    "cases", "ranks_max_abs_diff", "weights_max_abs_diff", "oom_max_abs_diff",
    "offload_bit_equal", "rows_per_s", "rows_per_s_2_ranks", "ratio", "communication_share", "cores",
)  # fmt: skip
CASES: tuple[tuple[TaskName, MethodName], ...] = (
    ("seq2seq", "full"), ("seq2seq", "lora"), ("causal", "full"), ("causal", "lora"),
)  # fmt: skip
BATCH = 5
"""Of 12 rows: steps of 5, 5 and 2."""
LARGER = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8, "vocab_size": 8192}
TIMED_BATCH, WARM_STEPS = 16, 3
OUT_OF_MEMORY_AT = 40
"""Operations of a pass into which the last rank comes."""


class Members:
    """`Ranks` of processes that all run this program: what rank 0 begins it writes into the store."""

    def __init__(self, store: Store, count: int, group: RankGroup) -> None:
        self.count, self.seconds = count, 0.0
        self._store, self._group, self._begun = store, group, 0

    def join(self, trained: Sequence[nn.Parameter], state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """They have joined, and begin alike."""

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
) -> Iterator[TrainingContext]:
    """What rank 0 trains with."""
    loaded = as_loaded(scene.model, scene.spec, scene.task)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        yield training_context(
            Path(scratch), loaded, scene.data, scene.spec, optimizer,
            journal or Journal(folder / "journal.jsonl"), plan=scene.plan, ranks=ranks,
        )  # fmt: skip


def watched_optimizer(scene: Scene, name: OptimizerName = "adamw") -> tuple[Optimizer, list[StepSeen]]:
    """That of a rank, and what it will have seen."""
    optimizer = make_optimizer(name, scene.model.named_parameters(), scene.spec.training, fused=True)
    seen: list[StepSeen] = []
    real = optimizer.step

    def step(number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        gradient = gradient_of(scene.model)
        norm = real(number, learning_rate, loss)
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
) -> list[StepSeen]:
    """All steps from the beginning, as rank 0."""
    scene.begin()
    optimizer, seen = watched_optimizer(scene, name)
    with training(folder, scene, optimizer, ranks, journal) as context:
        state = Trainable(context.loaded, optimizer, compiled=False).state
        ranks.join(context.loaded.trained, state, torch.device("cpu"))
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

    def scene(self, folder: Path) -> Scene:
        """Rows, and the model that all ranks begin with."""
        if self.timed:
            rows = self.timed * TIMED_BATCH
            return Scene(folder, dropout=0.0, dtype=torch.float32, batch_size=TIMED_BATCH, rows=rows, larger=LARGER)
        return Scene(
            folder, dropout=0.0, dtype=torch.float64, method=self.method, task=self.task, batch_size=BATCH, rows=ROWS
        )


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
    group = RankGroup(trained, SILENT_S)
    if rank:
        at = case.out_of_memory_at if rank == case.count - 1 else 0
        seen = follow(scene, store, group, own_folder, at)
        found: dict[str, float] = {} if case.timed else compared(alone, seen)
        found.pop("loss", None)  # nobody sees it: of a rank without rows it is rounded to fp32
    else:
        members = Members(store, case.count, group)
        if case.timed:
            found = timed_steps(own_folder, scene, members)
        else:
            facts = Facts(own_folder / "facts.jsonl")
            seen = run_steps(own_folder, scene, members, journal=facts)
            found = compared(alone, seen)
            apart = max(abs(one - other) for one, other in zip(expected, evaluated(scene), strict=True))
            found |= {"evaluation": apart, "redone": len(facts.facts)}
        members.tell({})
        members.check_equal()
    every: list[Any] = [None] * case.count
    dist.all_gather_object(every, found)
    if not rank:
        print(json.dumps({name: max(each.get(name, 0.0) for each in every) for name in found}))
    dist.barrier()
    dist.destroy_process_group()


def follow(scene: Scene, store: Store, group: RankGroup, folder: Path, out_of_memory_at: int) -> list[StepSeen]:
    """Do what rank 0 writes into the store, until that is nothing; what each step was. Memory runs out at one operation
    of the first step (0: at none)."""
    optimizer, steps_seen = watched_optimizer(scene)
    trainable = Trainable(as_loaded(scene.model, scene.spec, scene.task), optimizer, compiled=False)
    journal = Journal(folder / "journal.jsonl")
    follower = FollowingRank(trainable, scene.order, scene.rows, group, journal, scene.spec.training.seed)
    number, ran_out = 0, False
    while told := json.loads(store.get(f"told {number}")):
        if out_of_memory_at and not ran_out:
            ran_out = True
            with OutOfMemoryAt(out_of_memory_at):
                follower.train(told)
        else:
            follower.train(told)
        number += 1
    group.check_equal()
    return steps_seen


def compared(alone: list[StepSeen], together: list[StepSeen]) -> dict[str, float]:
    """Largest differences. Weights whose gradient is nothing but rounding are left out: Adam makes an update of it."""
    learning = [float(each.abs().max()) > LIMIT for each in alone[0].gradient]
    pairs = list(zip(alone, together, strict=True))
    return {
        "steps": len(together),
        "gradient": max(farthest(one.gradient, other.gradient) for one, other in pairs),
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
    return {
        "cases": len(found) + len(redone),
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
    differences = [found[name] for name in ("ranks_max_abs_diff", "weights_max_abs_diff", "oom_max_abs_diff")]
    return 0 if max(differences) <= LIMIT and found["offload_bit_equal"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
