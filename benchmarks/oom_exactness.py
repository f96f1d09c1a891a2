"""Out of memory at every operation of a step: what the real loop makes of it, compared with the undisturbed step.

    python -m benchmarks.oom_exactness [--every N] [--seconds 120] [--task classification] [--method lora]

A tiny fused T5 (with `--task classification` a RoBERTa with three labels) in float64 without dropout, with
`--method lora` one that stays as it is, with adapters, runs
`worker.training.loop.steps` with the real optimizers. At each operation of a step's forward and backward passes in turn
(`points`; at every `every`-th where all would take longer than `--seconds`; with optimizers but the first at every
tenth of those) an out-of-memory error is raised, in one of the message forms of `FORMS` after the other. Compared are
the gradient that the optimizer gets and the weights after it (`max_abs_diff`, `max_weight_diff`; without the biases of
an encoder's keys, which change nothing: optimizers make an update of what rounding leaves of their gradient), the steps
(`lost_steps`, `double_steps`), rows and their order (`rows_differ`). `recovery_ratio` is the worst case of rows that
went through the model besides those of the step, over those of the step; `lost_over_step` the median of the event's
milliseconds over an undisturbed step, in wall-clock time. `naive_wrong_share`: where retrying the failed micro-batch
alone, keeping the gradients that were there, would have gone wrong.

With dropout: `streams_differ` counts later steps whose random numbers begin elsewhere than those of the undisturbed
run, and `losses_differ` losses, of the step or later ones, that are not the same bit for bit where the step was redone
at the same size (as after fragmentation). Inside `optimizer.step()`, clipping included, `optimizer_points` of each
optimizer: whatever does not end the attempt, typed and after one call, counts as `optimizer_wrong`.

JSON on the last line; exit code 1 if any of that is not as it should be (differences of at most 1e-12).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress, cycle, islice
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command_line import parse
from jobs.errors import OutOfMemoryInOptimizer
from jobs.evaluation_metrics import LabelPlan
from jobs.memory_plan import OptimizerName
from jobs.plan import DataPlan, ModelPlan, make_plan
from jobs.spec import parse_spec
from jobs.trainer_facts import OomRecovered
from tests.support.samples import dataset_summary
from tests.training.contexts import as_loaded, training_context
from worker.training import loop
from worker.training.adapters.lora import method_of
from worker.training.dataset.data import PreparedDataset, Writer
from worker.training.journal import Journal
from worker.training.machine.out_of_memory import MemoryShortage
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.steps.order import StepOrder
from worker.training.steps.result import StepResult
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Batch

KEYS = (
    "task", "method", "points", "lost_steps", "double_steps", "rows_differ", "events_wrong", "max_abs_diff",
    "max_weight_diff", "recovery_ratio", "gradient_scale", "naive_wrong_share", "every", "forms", "dropout_points",
    "streams_differ", "losses_differ", "optimizer_points", "optimizer_wrong", "lost_over_step", "by_optimizer",
    "seconds",
)  # fmt: skip
MethodName = Literal["full", "lora"]
TaskName = Literal["seq2seq", "causal", "classification"]
LIMIT = 1e-12
WRONG = 1e-9
"""A gradient is wrong from here on, not rounded otherwise."""
ROWS, BATCH, MICRO_BATCH, STEPS = 12, 4, 4, 3
VOCABULARY, LABELS = 64, 3
CONFIGS: dict[TaskName, dict[str, Any]] = {
    "seq2seq": {
        "model_type": "t5", "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1,
        "num_heads": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0,
        "pad_token_id": 0, "eos_token_id": 1,
    },
    "causal": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "classification": {
        "model_type": "roberta", "architectures": ["RobertaForSequenceClassification"], "vocab_size": VOCABULARY,
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 96, "type_vocab_size": 1, "num_labels": LABELS, "pad_token_id": 0,
        "bos_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip
OTHERS_EVERY = 10
NAIVE_EVERY = 5
"""The comparison is made at every fifth point."""
OPTIMIZERS: tuple[OptimizerName, ...] = ("adamw", "adafactor")
"""`adamw_8bit` has no float64, and its update is one compiled call."""
FORMS: tuple[Callable[[], BaseException], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"),
    lambda: RuntimeError("CUDA error: out of memory"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    lambda: RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
                         "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"),
    lambda: RuntimeError("could not create a primitive"),
    lambda: RuntimeError("std::bad_alloc"),
    MemoryError,
)  # fmt: skip


class OutOfMemoryAt(TorchDispatchMode):
    """Counts operations, and raises an error at the `k`-th (from 1; 0: never)."""

    def __init__(self, k: int = 0, error: Callable[[], BaseException] = FORMS[0]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.k, self.error, self.count = k, error, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.k:
            raise self.error()
        return function(*args, **(kwargs or {}))


class Facts(Journal):
    """A journal that remembers its facts."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self.facts: list[OomRecovered] = []

    def note(self, fact: Any) -> None:
        """Remember."""
        self.facts.append(fact)


class WatchedOptimizer:
    """An optimizer that keeps the gradient it gets, and counts its calls."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module, ops: OutOfMemoryAt) -> None:
        self._optimizer, self._model, self._ops = optimizer, model, ops
        self.calls = 0
        self.begins = 0
        """Operations before the first call."""
        self.gradient: list[torch.Tensor] = []

    def step(self, number: int, learning_rate: float, loss: torch.Tensor) -> torch.Tensor:
        """The real one."""
        self.calls += 1
        if self.calls == 1:
            self.begins = self._ops.count
        with torch.utils._python_dispatch._disable_current_modes():
            self.gradient = gradient_of(self._model)
        return self._optimizer.step(number, learning_rate, loss)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


@dataclass
class RunSeen:
    """What one run did."""

    results: list[StepResult]
    losses: list[float]
    gradient: list[torch.Tensor]
    """Of the last step."""
    weights: list[torch.Tensor]
    rows: list[list[int]]
    """Of each step, as they went through the model when it was done, in order."""
    passed: int
    """Rows that went through the model, in passes that failed as well."""
    streams: list[bytes]
    """State of the generator as each pass of a step begins."""
    facts: list[OomRecovered]
    calls: int
    operations: int
    begins: int
    """Operations of the first step before the optimizer."""
    seconds: float
    error: BaseException | None = None


class Scene:
    """Rows, and a model that every run begins with alike."""

    def __init__(
        self, folder: Path, *, dropout: float, dtype: torch.dtype, method: MethodName = "full",
        task: TaskName = "seq2seq", batch_size: int = BATCH, rows: int = ROWS, larger: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`larger`: what the config has instead."""
        draw = random.Random(3)
        # Targets of more than 64 tokens are another length bucket.
        lengths = [(draw.randint(3, 40), draw.choice((draw.randint(3, 30), draw.randint(65, 80)))) for _ in range(rows)]
        inputs, targets = (
            [[draw.randrange(2, VOCABULARY) for _ in range(n)] for n in side] for side in zip(*lengths, strict=True)
        )
        if task == "classification":  # the long sides are texts then
            inputs, targets = targets, [[row % LABELS] for row in range(rows)]
        if task == "causal":  # one text, of which the second part is learned
            whole = [read + written for read, written in zip(inputs, targets, strict=True)]
            targets = [list(range(len(read), len(text))) for read, text in zip(inputs, whole, strict=True)]
            inputs = whole
        prepared = folder / f"rows-{dropout}-{dtype}"
        prepared.mkdir()
        with Writer(prepared, VOCABULARY) as writer:
            writer.add(inputs, targets)
            writer.finish({"train": np.arange(rows), "validation": np.arange(0)}, dataset_summary())
        self._folder, self.data = folder, PreparedDataset.open(prepared)
        self.rows = self.data.train
        self.spec = parse_spec(
            {
                "data": {"train": "rows.jsonl"},
                "training": {"epochs": 1, "batch_size": batch_size, "learning_rate": 0.01, "max_grad_norm": 0.1},
                "memory": {"micro_batch": MICRO_BATCH},
                "method": {"type": "lora", "rank": 4, "dropout": dropout} if method == "lora" else method,
            }
        )
        labels = tuple(LabelPlan(name=f"label {n}", rows=rows // LABELS) for n in range(LABELS))
        data = DataPlan(train="x", input="x", target="x", rows=rows, labels=labels)
        self.plan = make_plan(self.spec, ModelPlan(source="x", parameters=1), data, task=task)
        self.task = task_of(self.spec, task, data)
        self.order = StepOrder(self.task.widths(self.rows), batch_size, 1, self.spec.training.seed)
        torch.manual_seed(0)
        config = {**CONFIGS[task], **(larger or {})}
        self.model = self.task.bare(config, torch.float32)
        self.model.to(dtype)  # type: ignore[arg-type]  # wrapped by transformers
        if task == "seq2seq":
            self.model.lm_head.weight = torch.nn.Parameter(torch.randn_like(self.model.lm_head.weight) * 0.05)
        self.task.configure(self.model, fused=True, dropout=dropout)
        method_of(self.spec, "bfloat16").inject(self.model, 0, self.task.layout(config).head_modules)
        self.model.to(dtype)  # type: ignore[arg-type]  # wrapped by transformers
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:  # zero at first, and then nothing would flow into the other half of the adapters
                    parameter.normal_(0, 0.1)
        self._weights = weights_of(self.model)
        self._journal = folder / f"journal-{dropout}-{dtype}.jsonl"

    def run(self, ops: OutOfMemoryAt, optimizer: OptimizerName = "adamw", steps: int = 1) -> RunSeen:
        """So many steps from the beginning; the first one, optimizer included, under `ops`."""
        self.begin()
        journal = Facts(self._journal)
        made = make_optimizer(optimizer, self.model.named_parameters(), self.spec.training, fused=True)
        watched = WatchedOptimizer(made, self.model, ops)
        passed, streams = [0], []
        rows: list[list[int]] = [[]]
        kind = type(self._batches()[0])
        real_accumulate, real_loss = loop.accumulate, kind.loss_sum

        def accumulate(model: Any, batches: list[Batch], *rest: Any) -> torch.Tensor:
            streams.append(torch.get_rng_state().numpy().tobytes())
            rows[-1] = np.concatenate([batch.rows for batch in batches]).tolist()
            return real_accumulate(model, batches, *rest)

        def loss_sum(batch: Batch, model: Any) -> torch.Tensor:
            passed[0] += len(batch.rows)
            loss: torch.Tensor = real_loss(batch, model)
            return loss

        results, losses, error = [], [], None
        start = time.perf_counter()
        with (
            mock.patch.object(loop, "accumulate", accumulate),
            mock.patch.object(kind, "loss_sum", loss_sum),
            tempfile.TemporaryDirectory(dir=self._folder) as scratch,
        ):
            context = training_context(
                Path(scratch), as_loaded(self.model, self.spec, self.task), self.data, self.spec, watched, journal,
                plan=self.plan,
            )  # fmt: skip
            running = loop.steps(context)
            try:
                with ops:
                    results.append(next(running))
                seconds = time.perf_counter() - start
                for result in islice(running, steps - 1):
                    rows.append(rows[-1])
                    results.append(result)
            except Exception as caught:
                error, seconds = caught, time.perf_counter() - start
                results += list(running)  # nothing, for it has ended
        losses = [result.loss.item() for result in results]
        return RunSeen(
            results, losses, watched.gradient, weights_of(self.model), rows, passed[0], streams, journal.facts,
            watched.calls, ops.count, watched.begins, seconds, error,
        )  # fmt: skip

    def begin(self) -> None:
        """The weights of the beginning, and no gradients."""
        with torch.no_grad():
            for own, first in zip(self.model.parameters(), self._weights, strict=True):
                own.copy_(first)
        self.model.zero_grad(set_to_none=True)

    def _batches(self) -> list[Any]:
        """Of the first step."""
        return list(self.task.limit(self.rows, MICRO_BATCH).batches(self.rows, self.order.groups_of(0), 0))

    def naive(self, ops: OutOfMemoryAt) -> list[torch.Tensor]:
        """The gradient of the first step where a failed micro-batch is retried alone, in halves."""
        self.begin()
        batches = self._batches()
        tokens = sum(batch.target_tokens for batch in batches)
        with ops:
            while batches:
                try:
                    (batches[0].loss_sum(self.model) / tokens).backward()
                    batches = batches[1:]
                    continue
                except (RuntimeError, MemoryError):
                    pass
                batches = [*halves(batches[0]), *batches[1:]]
        return gradient_of(self.model)


def halves(batch: Any) -> list[Any]:
    """One micro-batch in two, or as it is where it has one row."""
    middle = len(batch.rows) // 2
    parts = [slice(0, middle), slice(middle, None)] if middle else [slice(None)]
    return [
        replace(
            batch,
            input_ids=batch.input_ids[part],
            attention_mask=None if batch.attention_mask is None else batch.attention_mask[part],
            labels=batch.labels[part],
            rows=batch.rows[part],
            **({"lengths": batch.lengths[part]} if hasattr(batch, "lengths") else {}),
        )
        for part in parts
    ]


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradient_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Copies; of weights without one, zeros."""
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in model.parameters()
    ]


def farthest(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference; infinite where something is no number, or missing."""
    if len(one) != len(other):
        return math.inf
    found = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    return found if math.isfinite(found) else math.inf


@contextmanager
def passing() -> Iterator[None]:
    """Every shortage is classified as fragmentation, which a CPU does not know: the step is redone at the same size."""
    with mock.patch.object(
        MemoryShortage, "beside", lambda self, other_processes: replace(self, cause="fragmentation")
    ):
        yield


def in_a_step(scene: Scene, optimizer: OptimizerName, every: int) -> dict[str, Any]:
    """Forward and backward of the first step, at every `every`-th operation."""
    expected = scene.run(OutOfMemoryAt(), optimizer)
    assert expected.error is None and not expected.facts
    gradient = weight = ratio = 0.0
    points = lost = rows = double = events = 0
    times: list[float] = []
    naive: list[bool] = []
    expected_rows = [int(row) for row in scene.order.rows_of(0)]
    assert expected.rows == [expected_rows]
    learning = [float(each.abs().max()) > LIMIT for each in expected.gradient]
    forms = cycle(FORMS)
    for k in range(1, expected.begins + 1, every):
        form = next(forms)
        seen = scene.run(OutOfMemoryAt(k, form), optimizer)
        points += 1
        gradient = max(gradient, farthest(seen.gradient, expected.gradient))
        weight = max(weight, farthest(*(list(compress(run.weights, learning)) for run in (seen, expected))))
        lost += [result.step for result in seen.results] != [1]
        double += seen.calls != 1
        rows += seen.rows != [expected_rows] or [result.rows for result in seen.results] != [BATCH]
        events += len(seen.facts) != 1
        ratio = max(ratio, (seen.passed - BATCH) / BATCH)
        times += [fact.milliseconds_lost for fact in seen.facts]
        if points % NAIVE_EVERY == 0:
            naive.append(farthest(scene.naive(OutOfMemoryAt(k, form)), expected.gradient) > WRONG)
    return {
        "points": points,
        "operations": expected.begins,
        "max_abs_diff": gradient,
        "max_weight_diff": weight,
        "lost_steps": lost,
        "double_steps": double,
        "rows_differ": rows,
        "events_wrong": events,
        "naive_points": len(naive),
        "naive_wrong_share": round(statistics.mean(naive or [False]), 3),
        "gradient_scale": max(float(each.abs().max()) for each in expected.gradient),
        "recovery_ratio": round(ratio, 3),
        "milliseconds_lost": round(statistics.median(times), 2),
        "lost_over_step": round(statistics.median(times) / 1000 / expected.seconds, 2),
    }


def with_dropout(scene: Scene, points: int) -> dict[str, int]:
    """Later steps draw the same numbers; a step redone at the same size is the same, bit for bit, as are later ones."""
    scene.run(OutOfMemoryAt())  # what is made once takes operations that later runs do not have
    expected = scene.run(OutOfMemoryAt(), steps=STEPS)
    streams = losses = 0
    places = np.linspace(1, expected.begins, points).astype(int)
    for k, form in zip(places.tolist(), cycle(FORMS), strict=False):
        smaller = scene.run(OutOfMemoryAt(k, form), steps=STEPS)
        streams += sum(one != other for one, other in zip(smaller.streams[-STEPS:], expected.streams, strict=True))
        with passing():
            same = scene.run(OutOfMemoryAt(k, form), steps=STEPS)
        streams += sum(one != other for one, other in zip(same.streams[-STEPS:], expected.streams, strict=True))
        losses += same.losses != expected.losses or farthest(same.weights, expected.weights) != 0
        losses += [fact.micro_batch_after for fact in same.facts] != [MICRO_BATCH]
    return {"dropout_points": points, "streams_differ": streams, "losses_differ": losses}


def in_the_optimizer(scene: Scene, optimizer: OptimizerName, most: int) -> dict[str, int]:
    """At up to `most` operations of the update, clipping included."""
    expected = scene.run(OutOfMemoryAt(), optimizer)
    places = np.unique(np.linspace(expected.begins + 1, expected.operations, most).astype(int)).tolist()
    wrong = 0
    for k, form in zip(places, cycle(FORMS), strict=False):
        seen = scene.run(OutOfMemoryAt(k, form), optimizer)
        wrong += not isinstance(seen.error, OutOfMemoryInOptimizer) or seen.calls != 1 or bool(seen.results)
    return {"points": len(places), "wrong": wrong}


def measure(
    folder: Path, *, every: int | None = None, seconds: float = 120.0, others: int = 60, method: MethodName = "full",
    task: TaskName = "seq2seq",
) -> dict[str, Any]:  # fmt: skip
    """Everything; `every` None: as close together as fits into about so many seconds. `others`: points of the rest."""
    start = time.perf_counter()
    exact = Scene(folder, dropout=0.0, dtype=torch.float64, method=method, task=task)
    exact.run(OutOfMemoryAt())  # what is made once, at the first step of a process, is made
    gc.freeze()  # what was imported is not looked through again at every recovery
    try:
        if every is None:
            begin = time.perf_counter()
            operations = exact.run(OutOfMemoryAt(), OPTIMIZERS[0]).begins
            exact.run(OutOfMemoryAt(operations))
            each = time.perf_counter() - begin
            every = max(1, math.ceil(each * operations / seconds))
        # The gradient does not depend on the optimizer: the others are looked at further apart.
        spacing = {name: every if name == OPTIMIZERS[0] else every * OTHERS_EVERY for name in OPTIMIZERS}
        found = {name: in_a_step(exact, name, spacing[name]) for name in OPTIMIZERS}
        inside = {name: in_the_optimizer(exact, name, others) for name in OPTIMIZERS}
        dropout = with_dropout(Scene(folder, dropout=0.1, dtype=torch.float32, method=method, task=task), others)
    finally:
        gc.unfreeze()
    worst = {
        name: max(each[name] for each in found.values())
        for name in ("max_abs_diff", "max_weight_diff", "recovery_ratio")
    }
    worst["gradient_scale"] = found[OPTIMIZERS[0]]["gradient_scale"]
    worst["naive_wrong_share"] = found[OPTIMIZERS[0]]["naive_wrong_share"]
    summed = ("points", "lost_steps", "double_steps", "rows_differ", "events_wrong")
    totals = {name: sum(each[name] for each in found.values()) for name in summed}
    return {
        "task": task,
        "method": method,
        **totals,
        **worst,
        "every": every,
        "forms": len(FORMS),
        **dropout,
        "optimizer_points": sum(each["points"] for each in inside.values()),
        "optimizer_wrong": sum(each["wrong"] for each in inside.values()),
        "lost_over_step": max(each["lost_over_step"] for each in found.values()),
        "by_optimizer": found,
        "seconds": round(time.perf_counter() - start, 1),
    }


def wrong(result: dict[str, Any]) -> list[str]:
    """Names of the figures that are not as they should be."""
    zeros = (
        "lost_steps", "double_steps", "rows_differ", "events_wrong", "streams_differ", "losses_differ",
        "optimizer_wrong",
    )  # fmt: skip
    over = {"max_abs_diff": LIMIT, "max_weight_diff": LIMIT, "recovery_ratio": 1.0}
    return [name for name in zeros if result[name]] + [name for name, most in over.items() if result[name] > most]


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, help="only every so manieth operation of a step")
    parser.add_argument("--seconds", type=float, default=120.0, help="what the points may take, about")
    parser.add_argument("--method", choices=get_args(MethodName), default="full", help="which weights are trained")
    parser.add_argument("--task", choices=get_args(TaskName), default="seq2seq", help="what is learned")
    parser.add_argument("--others", type=int, default=60, help="points with dropout, and in each optimizer")
    arguments = parse(parser, argv, every=150, others=2)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="longhaul-oom-") as folder:
        result = measure(
            Path(folder), every=arguments.every, seconds=arguments.seconds, others=arguments.others,
            method=arguments.method, task=arguments.task,
        )  # fmt: skip
    print(json.dumps(result))
    return 1 if wrong(result) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
