"""One training attempt, told from top to bottom: take the card, load once, go on where we were, step, leave a model."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from jobs.errors import DiskFull, Refused
from jobs.events import EvaluationFinished, ModelLoaded
from jobs.files import LineWriter
from jobs.plan import Plan
from jobs.rundir import RunDir
from jobs.spec import JobSpec
from worker.training import checkpoint, first_step, guards, hard_limit, order, start
from worker.training.checkpoint import TrainState
from worker.training.compiled import compile_blocks
from worker.training.data import PreparedDataset
from worker.training.device import hold_device, hold_job, prepare_numerics
from worker.training.evaluate import evaluate
from worker.training.evidence import Evidence
from worker.training.flops import Flops
from worker.training.journal import Journal
from worker.training.loop import steps
from worker.training.memory import Cache
from worker.training.model import WEIGHTS, LoadedModel, load, weights_of, write_model
from worker.training.model_files import read_config
from worker.training.neighbours import Neighbours
from worker.training.optimizer import Optimizer, make_optimizer
from worker.training.pace import Pace
from worker.training.randomness import seed_step
from worker.training.saving import Saver, clean, is_saved
from worker.training.settings import TrainerSettings
from worker.training.stop import Stop, StopAsked
from worker.training.tensorfile import write_tensors
from worker.training.window import Meter, fragmented

INTERRUPTED = 75
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


def train(run: RunDir, settings: TrainerSettings, journal: Journal, stop: Stop, attempt: int) -> int:
    """Train until done (exit code 0) or asked to stop (75). Every other typed end is a StageError."""
    device = torch.device(settings.device)
    guards.refuse_poor_device(device)
    limit = hard_limit.limit_of(run.spec().memory, settings.test_memory_limit)
    with contextlib.ExitStack() as held:
        held.enter_context(hold_job(run))
        try:
            held.enter_context(hold_device(run, device, journal, stop))
            neighbours = Neighbours.of(device)
            held.enter_context(hard_limit.on_card(device, limit))
            with start.loading(run):
                bench = set_up(run, device, neighbours, journal, stop, attempt)
            loaded = bench.loaded
            held.enter_context(
                hard_limit.on_host(device, limit, loaded.model, bench.optimizer, bench.data.train, loaded.pad_id)
            )
            stop.look()
        except StopAsked:
            return interrupted(journal)
        try:
            if bench.state.step == 0:
                look(bench)
            learn(bench)
            finish(bench)
        except StopAsked:  # between two steps or within an evaluation: the last step is whole either way
            save_last(bench)
            return interrupted(journal)
        finally:  # a good checkpoint of before is worth waiting for, whatever ends the attempt
            bench.saver.settle()
    return 0


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
        refuse_other_order(found.state)
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


def refuse_other_order(state: TrainState) -> None:
    """Rows would be seen twice, and others never, if the rest of a run followed another order than its beginning."""
    if state.order != order.VERSION:
        raise Refused(
            f"this run began with rows in order {state.order}, and this version of Longhaul orders them as "
            f"{order.VERSION}",
            code="other_order",
            hint="submit the job again, or go on with the version that began it; its checkpoints are kept",
        )


def learn(bench: Bench) -> None:
    """All steps that are left, and after each, in this order: log, stop if asked, evaluate, save, clear the cache."""
    spec, state, meter, memory = bench.spec, bench.state, bench.meter, bench.plan.memory
    device, first = bench.cache.device, state.step + 1
    schedule = spec.schedule
    saved_at = time.monotonic()
    meter.pace.begin()
    bench.journal.phase("step", step=state.step)
    first_step.begin(device)
    for result in steps(
        bench.loaded.model,
        bench.optimizer,
        bench.data.train,
        order.StepOrder(bench.data.train, schedule.batch_size, schedule.epochs, schedule.seed),
        spec,
        bench.plan,
        after=state.step,
        micro_batch=state.micro_batch,
        safe=state.safe,
        pad_id=bench.loaded.pad_id,
        cache=bench.cache,
        journal=bench.journal,
        flops=Flops.of_config(read_config(bench.loaded.folder, bench.loaded.folder.name)).rows,
        neighbours=bench.neighbours,
        stop=bench.stop,
        evidence=Evidence(bench.run.path),
    ):
        state.step, state.safe, state.validation_loss = result.step, dict(result.safe), None
        if result.step == first:
            first_step.tell(bench.journal, device, memory, result, start.Ways(spec, bench.plan, device))
        meter.add(result)
        if result.step % spec.log.every_steps == 0 or result.step == bench.plan.steps:
            bench.optimizer.raise_if_nonfinite()
            bench.metrics.write(row := meter.row(result, time.time()))
            if memory is not None and fragmented(row, memory.budget_bytes):
                bench.cache.clear()
        bench.stop.look()
        if result.step % spec.evaluate.every_steps == 0:
            look(bench)
        bench.saver.poll()
        if checkpoint_due(bench, saved_at):
            save(bench)
            saved_at = time.monotonic()
        if spec.memory.cache_clear_every and result.step % spec.memory.cache_clear_every == 0:
            bench.cache.clear()


def checkpoint_due(bench: Bench, saved_at: float) -> bool:
    """Every n-th step; and at the first evaluation (or step, where there are none) after so many minutes."""
    wanted, state = bench.spec.checkpoint, bench.state
    if wanted.every_steps is not None and state.step % wanted.every_steps == 0:
        return True
    evaluated = state.validation_loss is not None or not len(bench.data.validation)
    return wanted.every_minutes is not None and evaluated and time.monotonic() - saved_at >= 60 * wanted.every_minutes


def look(bench: Bench) -> None:
    """Evaluate the weights as they are, if there are rows for it. Raises StopAsked, leaving everything as it was."""
    if not len(bench.data.validation):
        return
    spec, state = bench.spec, bench.state
    bench.optimizer.raise_if_nonfinite()
    seen = evaluate(
        bench.loaded,
        bench.data.validation,
        max_rows=spec.evaluate.max_rows,
        samples=spec.evaluate.samples,
        micro_batch=state.micro_batch,
        safe=state.safe,
        cache=bench.cache,
        journal=bench.journal,
        stop=bench.stop,
    )
    bench.meter.pace.evaluated(seen.seconds)
    best = state.best_loss is None or seen.loss < state.best_loss
    state.validation_loss = seen.loss
    if best:
        state.best_loss = seen.loss
    if state.step == 0:
        state.first_loss = seen.loss
    bench.journal.note(
        EvaluationFinished(
            step=state.step, loss=seen.loss, rows=seen.rows, seconds=seen.seconds, best=best, samples=seen.samples
        )
    )
    log.info("step %d: validation loss %.4f over %d rows", state.step, seen.loss, seen.rows)
    bench.journal.phase("step", step=state.step)


def save(bench: Bench) -> None:
    """Begin to save the weights as they are: what the training waits for is the time of a copy, where one is made."""
    state = bench.state
    bench.optimizer.raise_if_nonfinite()
    state.window = bench.meter.settled()
    began = time.perf_counter()
    bench.saver.save(state)
    bench.meter.pace.saved(time.perf_counter() - began)
    bench.journal.phase("step", step=state.step)


def save_last(bench: Bench) -> None:
    """Save the weights as they are, unless that very checkpoint is there, and have it on disk."""
    bench.saver.settle()
    if bench.state.step and not is_saved(bench.run, bench.state):
        save(bench)
        bench.saver.settle()


def finish(bench: Bench) -> None:
    """Evaluate and save the last step, leave the best model (or the last) in `model/`, and say that it is done."""
    run, state, loaded = bench.run, bench.state, bench.loaded
    bench.metrics.close()
    if state.validation_loss is None:
        look(bench)
    save_last(bench)
    kept = checkpoint.best(run, bench.journal) if bench.spec.checkpoint.best else None
    step, loss = (kept.state.step, kept.state.validation_loss) if kept else (state.step, state.validation_loss)
    bench.journal.phase("save", step=state.step)
    free, needed = shutil.disk_usage(run.path).free, int(1.1 * loaded.parameter_bytes)
    if free < needed:
        raise DiskFull(
            f"the final model needs {needed} bytes, and {free} are free",
            hint="make room in the runs directory and submit the job again: it is at its last step",
        )

    def write_weights(file: Path) -> object:
        if kept is not None:
            return shutil.copyfile(kept.folder / WEIGHTS, file)
        return write_tensors(file, weights_of(loaded.model), bench.journal)

    write_model(loaded, run.model, write_weights, step=step, loss=loss)
    bench.journal.finish("done", model=run.model.name, loss=loss, first_loss=state.first_loss, step=step)


def interrupted(journal: Journal) -> int:
    """Say so; returns the exit code."""
    journal.finish("interrupted")
    log.info("stopped because asked to")
    return INTERRUPTED
