"""What an attempt works with, and how it is set up: decide, load once, allocate, go back to the newest checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.errors import Refused
from jobs.events import ModelLoaded
from jobs.files import LineWriter
from jobs.plan import Plan
from jobs.rundir import RunDir
from jobs.spec import JobSpec
from worker.training import start
from worker.training.checkpoints import checkpoint
from worker.training.checkpoints.checkpoint import TrainState
from worker.training.checkpoints.saving import Saver, clean
from worker.training.dataset.data import PreparedDataset
from worker.training.journal import Journal
from worker.training.machine.device import prepare_numerics
from worker.training.machine.neighbours import Neighbours
from worker.training.machine.usage import Cache
from worker.training.network import guards
from worker.training.network.compiled import compile_blocks
from worker.training.network.model import LoadedModel, load
from worker.training.optimizers.optimizer import Optimizer, make_optimizer
from worker.training.pace import Pace
from worker.training.steps import order
from worker.training.steps.randomness import seed_step
from worker.training.stop import Stop
from worker.training.window import Meter

log = logging.getLogger("longhaul.trainer")


@dataclass(frozen=True)
class Bench:
    """What an attempt works with, once it is set up. `state` and `meter` change as it goes; the rest does not."""

    run: RunDir
    spec: JobSpec
    plan: Plan
    journal: Journal
    stop: Stop
    data: PreparedDataset
    loaded: LoadedModel
    optimizer: Optimizer
    cache: Cache
    neighbours: Neighbours
    state: TrainState
    meter: Meter
    metrics: LineWriter
    saver: Saver


def set_up(
    run: RunDir, device: torch.device, neighbours: Neighbours, journal: Journal, stop: Stop, attempt: int
) -> Bench:
    """Decide what to train with; load once, allocate every state, go back to the newest checkpoint that verifies."""
    spec, plan = run.spec(), run.plan()
    folder, prepared = plan.model.folder, plan.data.prepared
    if folder is None or prepared is None:
        raise Refused(
            "plan.json names no prepared model and data", code="not_prepared", hint="run the stage prepare first"
        )
    clean(run)
    journal.phase("load")
    plan = start.planned(run, spec, plan, attempt, device, neighbours, journal, stop)
    prepare_numerics(device)
    seed_step(spec.schedule.seed, 0, 0)
    found = checkpoint.newest(run, spec.sha256(), journal)
    if found is not None:
        checkpoint.refuse_other_order(found.state)
    elif spec.resume_from is not None:
        raise Refused(
            f"the checkpoint of {spec.resume_from} that this job was to go on from does not verify any more",
            code="no_checkpoint",
            param="resume_from",
            hint="submit the job again, from that job if it is still there; the trainer's log says what was damaged",
        )
    loaded = load(
        Path(folder),
        device,
        dropout=spec.schedule.dropout,
        fused=spec.speed.fused,
        recompute_layers=plan.resolved.recompute_layers,
    )
    optimizer = make_optimizer(
        plan.resolved.optimizer, loaded.model.named_parameters(), spec.schedule, fused=spec.speed.fused
    )
    optimizer.compile(journal)
    blocks = compile_blocks(loaded.model, journal) if plan.resolved.compile else None
    if found is not None:
        checkpoint.restore(found, loaded.model, optimizer)
        state = found.state
        state.micro_batch = min(state.micro_batch, plan.resolved.micro_batch)
    else:
        state = TrainState(spec_sha256=spec.sha256(), order=order.VERSION, micro_batch=plan.resolved.micro_batch)
    guards.refuse_copied(loaded.model, loaded.pointers)
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
            compiled=blocks is not None and blocks.failure is None,
        )
    )
    log.info("model loaded in %.1f s; %d of %d steps are done", loaded.seconds, state.step, plan.steps)
    cache = Cache(device)
    return Bench(
        run=run,
        spec=spec,
        plan=plan,
        journal=journal,
        stop=stop,
        data=PreparedDataset.open(Path(prepared)),
        loaded=loaded,
        optimizer=optimizer,
        cache=cache,
        neighbours=neighbours,
        state=state,
        meter=Meter(
            cache=cache,
            attempt=attempt,
            pace=Pace(spec, plan, state.window.asides),
            window=state.window,
            planned_bytes=None if plan.memory is None else plan.memory.peak_bytes,
            neighbours=neighbours,
        ),
        metrics=LineWriter(run.metrics_file),
        saver=Saver(run, loaded.model, optimizer, spec.checkpoint.keep, journal),
    )
