"""A job of FLAN-T5-XL's size through the trainer's own code: load, compile, steps, memory that runs out, a checkpoint.

Weights are random, and so are the rows, which all have the longest shape. What a step takes does not depend on either.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jobs.disk.rundir import RunDir
from jobs.errors import Rejected
from jobs.gpus import GpuFacts, peak_flops
from jobs.memory_plan import MemoryPlan
from jobs.spec import CheckpointSpec, JobSpec, parse_spec
from jobs.text.units import (
    GIB,
    MIB,
    bytes_alike,
    format_bytes,
    format_duration,
    format_figure,
    format_milliseconds,
    format_parameters,
    format_share,
)
from jobs.trainer_facts import CheckpointSaved, DiskLow, OomRecovered
from worker.training.checkpoints.checkpoint import MANIFEST, OPTIMIZER, WEIGHTS, folder_of
from worker.training.checkpoints.saving import Saver, bytes_needed, write
from worker.training.context import TrainingContext, set_up
from worker.training.dataset.data import Rows
from worker.training.doctor.finding import Check, Examination, Finding, judge, skip
from worker.training.doctor.job import ListeningJournal, Widths, make_run
from worker.training.doctor.measured_steps import Stepping, Steps, sample_gradient, wait_for
from worker.training.doctor.random_t5 import SHAPES, checkpoint_bytes, write_checkpoint
from worker.training.doctor.report import MOST_MFU
from worker.training.journal import StopSignal
from worker.training.loop import accumulate
from worker.training.machine.numerics import prepare_device
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.network import guards
from worker.training.planning.budget import Budget, find_budget, on_gpu
from worker.training.planning.memory_plan import CONTEXT_BYTES, plan_memory
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.seq2seq.compiled import CompiledBlocks
from worker.training.tasks.seq2seq.task import Seq2Seq
from worker.training.tasks.task import Batch

MODELS = ("xl", "large", "base")
"""Of FLAN-T5, the largest first."""
LONGEST, SHORTER, BATCH = {"cuda": (256, 256), "cpu": (32, 32)}, {"cuda": (128, 256), "cpu": (16, 32)}, {
    "cuda": 64, "cpu": 8,
}  # fmt: skip
MEASURED_STEPS = 2
LOAD_LIMIT, LEAST_OF_PLAN, UPDATE_LIMIT_S, STALL_LIMIT_S = 1.05, 0.9, 0.3, 1.0
LEAST_MFU, GOOD_MFU = 0.30, 0.40
SPARE_BYTES = GIB
"""Of disk, besides the weights."""
NOISE_BYTES = 64 * MIB
"""Of buffers while loading, whatever the model's size."""
GRADIENT_LIMIT = 0.05
"""Distance of two gradients of the same rows, cut otherwise, relative to their norm: in bf16 each is 2 % off
the true one (docs/bf16.md)."""
KEPT = 0.5
"""Share of the activations that an oversized batch still gets."""
NOT_LOADED = "the model was not loaded"


class TrainingChecks:
    """The job, as far as it has come."""

    def __init__(self, examination: Examination) -> None:
        self.examination = examination
        self.device = torch.device(examination.device)
        self.journal = ListeningJournal(examination.folder / "journal.jsonl")
        self.stop = StopSignal()
        self.name = ""
        self.parameters = ""
        self.context: TrainingContext | None = None
        self.stepping: Stepping | None = None
        self.steps: Steps | None = None
        self.update_s: float | None = None

    # -- load, compile ----------------------------------------------------------------------------------------------

    def load(self) -> Finding:
        """Write random weights, plan, load them as an attempt does."""
        device, folder = self.device, self.examination.folder
        prepare_device(device)
        monitor = ProcessMonitor.of(device)
        spec = job_spec(device.type)
        self.name, memory = self.choose(spec)
        config = SHAPES[self.name]
        needed, free = checkpoint_bytes(config) + SPARE_BYTES, shutil.disk_usage(folder).free
        if free < needed:
            figures = bytes_alike(free, needed)
            return judge("load", f"{figures[0]} of disk are free", limit=f"≥ {figures[1]} for random weights",
                         fail=True, hint="make room in the runs directory, or name a smaller --model")  # fmt: skip
        write_checkpoint(folder / "model", config)
        batch = spec.training.batch_size
        run = make_run(
            folder / "runs", spec, config, folder / "model", memory, (4 * batch, LONGEST[device.type]),
            (2 * batch, SHORTER[device.type]),
        )  # fmt: skip
        self.context = context = set_up(run, device, monitor, self.journal, self.stop, 1)
        loaded = context.loaded
        self.parameters = f"{self.name} ({format_parameters(loaded.parameters)} parameters)"
        resolved = context.plan.resolved
        excess = (loaded.peak_ratio - 1) * loaded.parameter_bytes
        found = judge(
            "load",
            f"{self.parameters}: peak {format_figure(loaded.peak_ratio, 3)} × its weights, "
            f"{format_duration(loaded.seconds)}, "
            f"micro-batch {resolved.micro_batch}, {resolved.optimizer}", limit=f"≤ {LOAD_LIMIT}, or 64 MiB besides",
            fail=loaded.peak_ratio > LOAD_LIMIT and excess > NOISE_BYTES,
            hint="report it: the model is held twice", ratio=loaded.peak_ratio,
            seconds=loaded.seconds, parameters=loaded.parameters, micro_batch=resolved.micro_batch,
            activation_checkpointing=resolved.activation_checkpointing, compiled=resolved.compile,
        )  # fmt: skip
        return found.model_copy(update={"model": self.name})

    def choose(self, spec: JobSpec) -> tuple[str, MemoryPlan]:
        """The model that was asked for, else the largest that fits, and its plan. Raises Rejected where none does."""
        kind = self.examination.device
        asked = self.examination.model or (None if kind == "cuda" else "tiny")
        refusal: Rejected | None = None
        for name in (asked,) if asked else MODELS:
            try:
                return name, plan_memory(
                    spec, Seq2Seq(), SHAPES[name], LONGEST[kind], device=kind, budget=self.budget(spec)
                )
            except Rejected as error:
                refusal = error
        assert refusal is not None, "there are models"
        raise refusal

    def budget(self, spec: JobSpec) -> Budget:
        """Of a GPU what is free now."""
        if self.device.type == "cpu":
            return find_budget(spec.memory, "cpu", None)
        free, total = torch.cuda.mem_get_info(self.device)
        gpu = self.examination.gpu or GpuFacts(torch.cuda.get_device_name(self.device), total)
        return on_gpu(min(total, free + CONTEXT_BYTES), "gpu", gpu)

    def compile_cold(self) -> Finding:
        """How long compiling took, with empty caches."""
        if self.context is None:
            return skip("compile_cold", NOT_LOADED)
        encoder: Any = self.context.loaded.model.encoder
        blocks: CompiledBlocks | None = encoder.compiled
        if self.device.type == "cpu":
            return skip("compile_cold", "layers run uncompiled on a CPU")
        if blocks is None or blocks.failure:
            why = blocks.failure if blocks else "they are not fused"
            return judge("compile_cold", f"layers are not compiled: {why}", fail=True, hint="see compiler")
        seconds = self.journal.loaded_at - max(began for phase, began in self.journal.phases if phase == "compile")
        return judge("compile_cold", f"{format_duration(seconds)} with empty caches", seconds=seconds)

    # -- steps ------------------------------------------------------------------------------------------------------

    def graphs(self) -> Finding:
        """Makes the steps; nothing may be compiled in them."""
        if self.context is None:
            return skip("graphs", NOT_LOADED)
        self.stepping = Stepping(self.context, self.device)
        self.stepping.step()
        self.steps = self.stepping.measure(MEASURED_STEPS)
        return judge("graphs", f"{self.steps.graphs} compiled in {self.steps.count} steps", limit="0",
                     fail=self.steps.graphs > 0, hint="report it: steps are compiled again and again")  # fmt: skip

    def peak(self) -> Finding:
        """Against the plan."""
        if self.steps is None:
            return skip("peak", "no steps were made")
        planned = sum(self.steps.planned.values()) - self.steps.planned["context"]
        found, most = bytes_alike(self.steps.allocated, planned)
        share = self.steps.allocated / planned
        return judge(
            "peak", f"{found}, {format_share(share)} of the plan",
            limit=f"{format_share(LEAST_OF_PLAN)} to 100 % of {most}", fail=share > 1,
            warn=share < LEAST_OF_PLAN, hint="report it: plans for this GPU are wrong", bytes=self.steps.allocated,
            planned_bytes=planned,
        )  # fmt: skip

    def waits(self) -> Finding:
        """Of the host."""
        if self.steps is None:
            return skip("waits", "no steps were made")
        return judge("waits", f"{self.steps.waits} waits for the GPU in {self.steps.count} steps", limit="≤ 1 a step",
                     fail=self.steps.waits > self.steps.count, hint="report it: the GPU idles meanwhile")  # fmt: skip

    def mfu(self) -> Finding:
        """Of the measured peak; of the nominal one where nothing was measured."""
        if self.steps is None:
            return skip("mfu", "no steps were made")
        reached, measured = self.steps.flops / self.steps.seconds, self.examination.gemm_flops
        step_flops = self.steps.flops / self.steps.count
        peak = measured or peak_flops(torch.cuda.get_device_name(self.device))
        if peak is None:
            return judge("mfu", f"{reached / 1e12:.1f} TFLOP/s; the GPU's peak is unknown", warn=True, flops=reached,
                         step_flops=step_flops)  # fmt: skip
        mfu = reached / peak
        return judge(
            "mfu", f"{mfu:.2f} of the {'measured' if measured else 'nominal'} peak ({reached / 1e12:.1f} TFLOP/s)",
            limit=f"≥ {LEAST_MFU:.2f}, better {GOOD_MFU:.2f}", fail=not LEAST_MFU <= mfu <= MOST_MFU,
            warn=mfu < GOOD_MFU,
            mfu=mfu, flops=reached, step_flops=step_flops,
            hint="report it: the GPU does not compute" if mfu > MOST_MFU else "see power, compile_cold and waits",
        )  # fmt: skip

    def update(self) -> Finding:
        """The optimizer alone."""
        if self.context is None or self.steps is None:
            return skip("update", "no steps were made")
        context, number = self.context, self.context.state.step
        loss = accumulate(context.loaded.model, self.batches(context.data.train)[:1])
        times = []
        for more in range(3):
            wait_for(self.device)
            begun = time.perf_counter()
            context.optimizer.step(number + more + 1, 1e-6, loss)
            wait_for(self.device)
            times.append(time.perf_counter() - begun)
        context.loaded.model.zero_grad(set_to_none=True)
        context.optimizer.raise_if_nonfinite()
        self.update_s = min(times)
        return judge_update(self.update_s, context.plan.resolved.optimizer, cuda=self.device.type == "cuda")

    def batches(self, rows: Rows) -> Sequence[Batch]:
        """The first rows of these, as many as a step has, in micro-batches of the plan."""
        assert self.context is not None
        task, loaded = self.context.loaded.task, self.context.loaded
        limit = task.limit(self.context.data.train, self.context.plan.resolved.micro_batch)
        return limit.batches(rows, [np.arange(self.context.spec.training.batch_size)], loaded.pad_id)

    def throughput(self) -> Finding:
        """Rows a second in both shapes."""
        if self.context is None or self.steps is None or self.update_s is None:
            return skip("throughput", "no steps were made")
        batches = self.batches(self.context.data.validation)
        accumulate(self.context.loaded.model, batches[:2])
        wait_for(self.device)
        begun = time.perf_counter()
        accumulate(self.context.loaded.model, batches)
        wait_for(self.device)
        seconds = time.perf_counter() - begun + self.update_s
        self.context.loaded.model.zero_grad(set_to_none=True)
        kind, size = self.device.type, self.context.spec.training.batch_size
        rates = {
            named(SHORTER[kind]): size / seconds,
            named(LONGEST[kind]): self.steps.rows / self.steps.seconds,
        }
        shown = ", ".join(f"{rate:.1f} rows/s at {shape}" for shape, rate in rates.items())
        found = judge("throughput", f"{self.parameters}: {shown} tokens, in steps of {size} rows")
        return found.model_copy(update={"values": rates})

    def weights_in_place(self) -> Finding:
        """Nothing was copied on the way."""
        if self.context is None:
            return skip("weights_in_place", NOT_LOADED)
        moved = guards.moved_parameters(self.context.loaded.model, self.context.loaded.pointers)
        return judge("weights_in_place", f"{len(moved)} parameters were moved", limit="0", fail=bool(moved),
                     hint="report it: weights are held twice")  # fmt: skip

    # -- what goes wrong, and what is kept --------------------------------------------------------------------------

    def checkpoint_copy(self) -> Finding:
        """A save beside a step, against one that training waits for."""
        context = self.context
        if context is None or self.stepping is None or self.steps is None:
            return skip("checkpoint_copy", "no steps were made")
        live = {WEIGHTS: context.loaded.weights, OPTIMIZER: context.optimizer.state_dict()}
        needed, free = 2 * bytes_needed(live), shutil.disk_usage(context.run.path).free
        if free < needed:
            figures = bytes_alike(needed, free)
            return skip("checkpoint_copy", f"two checkpoints need {figures[0]} of disk, {figures[1]} are free")
        saver = Saver(context.run, context.loaded.weights, context.optimizer, CheckpointSpec(keep=1), self.journal)
        if not saver.reserve(live):
            return judge("checkpoint_copy", "the host has no room for a copy", warn=True,
                         hint="steps wait for as long as a checkpoint is written; add memory")  # fmt: skip
        waited = RunDir(self.examination.folder / "waited")
        waited.path.mkdir()
        plain = write(waited, context.state, live, CheckpointSpec(keep=1), self.journal)
        state = context.state.model_copy(deep=True)
        wait_for(self.device)
        begun = time.perf_counter()
        saver.save(state)
        self.stepping.step()
        wait_for(self.device)
        stall = max(0.0, time.perf_counter() - begun - self.steps.seconds / self.steps.count)
        saver.wait()
        saved = [fact for fact in self.journal.facts if isinstance(fact, CheckpointSaved)]
        if isinstance(plain, DiskLow) or not saved:
            return judge("checkpoint_copy", "the disk became full", fail=True, hint="make room")
        same = sums(waited, state.step) == sums(context.run, state.step)
        return judge_checkpoint_copy(stall, saved[-1], same=same, cuda=self.device.type == "cuda")

    def oversized_batch(self) -> Finding:
        """The same step with and without enough memory."""
        if self.context is None or self.steps is None:
            return skip("oversized_batch", "no steps were made")
        context, model, planned = self.context, self.context.loaded.model, self.steps.planned
        set_dropout(model, 0.0)
        for stack in (model.encoder, model.decoder):
            stack.compiled = None  # type: ignore[union-attr]  # a fused stack; predictions are of eager layers
        activations = planned["activations"] + planned["temporaries"]
        limits = (None, int(sum(planned.values()) - (1 - KEPT) * activations))
        samples = [sample_gradient(context, self.device, limit) for limit in limits]
        recovered = [fact for fact in self.journal.facts if isinstance(fact, OomRecovered)]
        distance = float((samples[1] - samples[0]).norm() / samples[0].norm())
        if not recovered:
            return judge("oversized_batch", "memory did not run out", fail=True, hint="see hard_limit")
        sizes = f"{recovered[0].micro_batch_before} rows became {recovered[-1].micro_batch_after}"
        return judge(
            "oversized_batch", f"{sizes}; the gradient is {format_share(distance)} off",
            limit=f"≤ {format_share(GRADIENT_LIMIT)}",
            fail=not distance <= GRADIENT_LIMIT, hint="report it: a recovered step is not the same step",
            distance=distance,
        )  # fmt: skip


def checks(examination: Examination) -> Mapping[str, Check]:
    """By name."""
    training = TrainingChecks(examination)
    return {
        "load": training.load,
        "compile_cold": training.compile_cold,
        "graphs": training.graphs,
        "peak": training.peak,
        "waits": training.waits,
        "mfu": training.mfu,
        "update": training.update,
        "throughput": training.throughput,
        "weights_in_place": training.weights_in_place,
        "checkpoint_copy": training.checkpoint_copy,
        "oversized_batch": training.oversized_batch,
    }


def judge_update(seconds: float, optimizer: str, *, cuda: bool) -> Finding:
    """Of one update; on a CPU it takes as long as it takes."""
    limit = f"≤ {format_milliseconds(UPDATE_LIMIT_S)}" if cuda else None
    return judge("update", f"{format_milliseconds(seconds)} by {optimizer}", limit=limit,
                 fail=cuda and seconds > UPDATE_LIMIT_S, hint="see memory_bandwidth", seconds=seconds)  # fmt: skip


def judge_checkpoint_copy(stall_s: float, saved: CheckpointSaved, *, same: bool, cuda: bool) -> Finding:
    """Of how much longer a step beside a save took, and whether its files are the `same` as those waited for."""
    return judge(
        "checkpoint_copy",
        f"a step beside it took {format_milliseconds(stall_s)} longer; {format_bytes(saved.bytes)} in "
        f"{format_duration(saved.seconds)}, {'the same' if same else 'OTHER'} sha256 as one waited for",
        limit=f"≤ {format_milliseconds(STALL_LIMIT_S)}, the same", fail=not same,
        warn=cuda and stall_s > STALL_LIMIT_S,
        hint="see device_to_host" if same else "report it: checkpoints are wrong", stall_s=stall_s,
        bytes_per_s=saved.bytes / saved.seconds,
    )  # fmt: skip


def job_spec(kind: str) -> JobSpec:
    """The default job."""
    inputs, targets = LONGEST[kind]
    return parse_spec(
        {
            "model": "random",
            "data": {"train": "random.jsonl", "max_input_tokens": inputs, "max_target_tokens": targets},
            "training": {"epochs": 5, "batch_size": BATCH[kind], "learning_rate": 1e-5},
        }
    )


def named(widths: Widths) -> str:
    """`128/256`."""
    return "{}/{}".format(*widths)


def sums(run: RunDir, step: int) -> dict[str, str]:
    """sha256 of the tensors of a checkpoint, by file."""
    files = json.loads((folder_of(run, step) / MANIFEST).read_bytes())["files"]
    return {name: files[name]["sha256"] for name in (WEIGHTS, OPTIMIZER)}
