"""What an attempt works with, and how it is set up: decide, load once, allocate, go back to the newest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from jobs.disk.files import LineWriter
from jobs.disk.rundir import RunDir, truncate_metrics
from jobs.plan import Plan
from jobs.spec import JobSpec
from jobs.trainer_facts import ModelLoaded
from worker.training import start
from worker.training.adapters.lora import method_of
from worker.training.checkpoints import checkpoint
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.checkpoints.pruning import clean, start_from_scratch
from worker.training.checkpoints.saving import Saver
from worker.training.dataset.data import PreparedDataset, Rows
from worker.training.gpu_speed import GpuSpeed
from worker.training.journal import Journal, StopSignal
from worker.training.machine.out_of_memory import MemoryProbe
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.machine.usage import Cache
from worker.training.network import guards
from worker.training.network.model import LoadedModel, load
from worker.training.optimizers.loss_scaling import LossScaling
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.pace import Pace
from worker.training.ranks.ranks import Alone, Ranks
from worker.training.run_length import Due, RunLength, noted_correction, seconds_spent, stopwatch
from worker.training.steps import order
from worker.training.steps.order import StepOrder, mixture_of
from worker.training.steps.randomness import init_seed, seed_step
from worker.training.tasks.registry import task_of
from worker.training.tasks.task import Task
from worker.training.window import Meter

log = logging.getLogger("longhaul.trainer")
SAMPLE = 10_000
"""Rows that stand for all of them."""


@dataclass(frozen=True)
class Trainable:
    """What is trained, and what trains it: the same on every rank."""

    loaded: LoadedModel
    optimizer: Optimizer
    compiled: bool
    """Whether layers run compiled."""

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Weights and optimizer states: the tensors themselves."""
        weights = {f"weights.{name}": tensor for name, tensor in self.loaded.weights.items()}
        return weights | {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_dict().items()}


@dataclass(frozen=True)
class TrainingContext:
    """What an attempt works with, once it is set up. Only `state`, `length`, `due` and `meter` change as it goes."""

    run: RunDir
    spec: JobSpec
    plan: Plan
    journal: Journal
    stop: StopSignal
    data: PreparedDataset
    order: StepOrder
    loaded: LoadedModel
    optimizer: Optimizer
    cache: Cache
    monitor: MemoryProbe
    """The other processes on the GPU; on a CPU none."""
    state: TrainState
    length: RunLength
    due: Due
    meter: Meter
    metrics: LineWriter
    saver: Saver
    ranks: Ranks = field(default_factory=Alone)

    @property
    def scaling(self) -> LossScaling | None:
        """Where the model is float16."""
        return self.optimizer if isinstance(self.optimizer, LossScaling) else None

    @property
    def longest_target(self) -> int:
        """Tokens that 99 % of the targets do not exceed, end-of-sequence included."""
        return self.data.manifest.report.lengths.target.after.p99

    @classmethod
    def of(
        cls,
        run: RunDir,
        spec: JobSpec,
        plan: Plan,
        *,
        attempt: int,
        journal: Journal,
        stop: StopSignal,
        data: PreparedDataset,
        loaded: LoadedModel,
        optimizer: Optimizer,
        monitor: MemoryProbe,
        state: TrainState,
        first: int = 0,
        spent_s: float = 0.0,
        ranks: Ranks | None = None,
    ) -> TrainingContext:
        """With the rest, which follows from these. `first`: steps that another job did; `spent_s`: seconds in attempts
        of this one until now."""
        cache = Cache(loaded.model.device)
        planned_bytes = None if plan.memory is None else plan.memory.peak_bytes
        pace = Pace(spec, plan, state.window.asides)
        length = RunLength(spec, plan, state, pace, first=first, spent_s=stopwatch(spent_s))
        saver = Saver(run, loaded.weights, optimizer, spec.checkpoint, journal)
        return cls(
            run=run,
            spec=spec,
            plan=plan,
            journal=journal,
            stop=stop,
            data=data,
            order=order_of(spec, plan, data, loaded.task),
            loaded=loaded,
            optimizer=optimizer,
            cache=cache,
            monitor=monitor,
            state=state,
            length=length,
            due=Due(spec, state, length=length, validation_rows=len(data.validation), best_saved=saver.best_cost),
            meter=Meter(
                cache,
                attempt,
                pace,
                state.window,
                planned_bytes,
                monitor,
                gpu_speed(run, cache.device, loaded, plan, data.train),
            ),
            metrics=LineWriter(run.metrics_file, journal.fence),
            saver=saver,
            ranks=ranks or Alone(),
        )


def order_of(spec: JobSpec, plan: Plan, data: PreparedDataset, task: Task) -> StepOrder:
    """The rows of every step."""
    training, sources = spec.training, plan.data.sources_of(spec)
    mixture = mixture_of(sources, data.rows_of_sources(len(sources)), training.seed)
    return StepOrder(task.widths(data.train), training.batch_size, training.epochs, training.seed, mixture)


def load_trainable(spec: JobSpec, plan: Plan, folder: Path, device: torch.device, journal: Journal) -> Trainable:
    """The prepared model of this folder, loaded once, and its optimizer, with every state allocated."""
    method = method_of(spec, plan.resolved.dtype)
    loaded = load(
        folder,
        device,
        task=task_of(spec, plan.task, plan.data),
        dropout=spec.training.dropout,
        fused=spec.speed.fused,
        activation_checkpointing=plan.resolved.activation_checkpointing,
        method=method,
        seed=init_seed(spec.training.seed),
    )
    optimizer = make_optimizer(
        plan.resolved.optimizer, loaded.model.named_parameters(), spec.training, fused=spec.speed.fused
    )
    if method.dtype == torch.float16:
        optimizer = LossScaling(optimizer, loaded.model.parameters())
    optimizer.compile(journal)
    return Trainable(loaded, optimizer, plan.resolved.compile and loaded.task.compile(loaded.model, journal) is None)


def set_up(
    run: RunDir, device: torch.device, monitor: ProcessMonitor, journal: Journal, stop: StopSignal, attempt: int,
    start_ranks: Callable[[Plan], Ranks] = lambda plan: Alone(), traces: Path | None = None,
) -> TrainingContext:  # fmt: skip
    """Decide what to train with; load once, allocate every state, go back to the newest checkpoint that verifies.

    `start_ranks` is called with the plan of this attempt: other ranks load while this one does. `traces`: as of
    `Predictor`.
    """
    spec, plan = run.spec(), start.planned(run)
    journal.fence()
    clean(run)
    record = run.record()
    from_scratch = start_from_scratch(run, record.scratch_attempt)
    journal.phase("load")
    expected = None if from_scratch else record.checkpoint
    if expected is None and spec.resume_from is not None and not record.scratch_attempt:
        expected = f"the checkpoint of {spec.resume_from}"  # trained by hand: the events do not know of it
    method = method_of(spec, plan.resolved.dtype)
    folder, data = start.open_stores(run, plan, journal, weights=expected is None or not method.whole)
    if spec.kind == "evaluate":
        data.validation = data.train
    if record.sweep is not None:
        plan = start.within_reserved(plan)
    plan = start.plan_attempt(run, spec, plan, attempt, device, monitor, journal, stop, traces)
    ranks = start_ranks(plan)
    seed_step(spec.training.seed, 0)
    found = checkpoint.newest(run, run.spec_sha256(), journal, expected=expected)
    if found is not None:
        checkpoint.check_order(found.state)
        if (metric := spec.checkpoint.best) is not None:  # if it is damaged, the next best has yet to be saved
            checkpoint.best(run, metric, journal, verified=found)
    trainable = load_trainable(spec, plan, folder, device, journal)
    loaded, optimizer = trainable.loaded, trainable.optimizer
    if found is not None:
        checkpoint.restore(found, loaded.weights, optimizer)
        state = found.state
        state.micro_batch = min(state.micro_batch, plan.resolved.micro_batch)
    else:
        state = TrainState(spec_sha256=run.spec_sha256(), order=order.VERSION, micro_batch=plan.resolved.micro_batch)
    # Of a job without a limit there is nothing to find.
    attempts = range(max(1, record.scratch_attempt), attempt + 1) if spec.training.max_hours is not None else range(0)
    state.correction = noted_correction(run, attempts) or state.correction
    journal.fence()
    truncate_metrics(run.metrics_file, state.step)
    with monitor.taking():
        ranks.join(loaded.trained, trainable.state, device)
    guards.check_not_copied(loaded.model, loaded.pointers)
    journal.progress(step=state.step)
    journal.note(
        ModelLoaded(
            parameters=loaded.parameters,
            parameter_bytes=loaded.parameter_bytes,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=str(device),
            seconds=loaded.seconds,
            peak_ratio=loaded.peak_ratio,
            resumed_step=None if found is None else state.step,
            compiled=trainable.compiled,
        )
    )
    log.info("method %s: %d weights are trained", method.description, loaded.trained_parameters)
    log.info("model loaded in %.1f s; %d of %d steps are done", loaded.seconds, state.step, plan.steps)
    return TrainingContext.of(
        run,
        spec,
        plan,
        attempt=attempt,
        journal=journal,
        stop=stop,
        data=data,
        loaded=loaded,
        optimizer=optimizer,
        monitor=monitor,
        state=state,
        first=record.adopted_step,
        spent_s=seconds_spent(run, attempts),
        ranks=ranks,
    )


def gpu_speed(run: RunDir, device: torch.device, loaded: LoadedModel, plan: Plan, rows: Rows) -> GpuSpeed | None:
    """The measured figures of the GPU, to which those of this job are added; None on a CPU, and for a trial, for others
    may be beside it."""
    if device.type != "cuda" or run.record().sweep is not None:
        return None
    lengths = rows.input_lengths[:SAMPLE], rows.target_lengths[:SAMPLE]
    again = loaded.task.recomputed_flops(loaded.config, plan.resolved.activation_checkpointing).forward(*lengths)
    recomputed = again / loaded.flops.rows(*lengths)
    return GpuSpeed.of(
        run.path.parent,
        device,
        parameters=loaded.parameters,
        compiled=plan.resolved.compile,
        recomputed=recomputed,
        # Where a GPU waits for the host, or for others, its pace says nothing of other jobs.
        kept=plan.resolved.optimizer != "adamw_offload" and plan.resolved.gpus == 1,
    )
