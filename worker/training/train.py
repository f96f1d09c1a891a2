"""One training attempt, told from top to bottom: take the card, load once, go on where we were, step, leave a model."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from pathlib import Path

import torch

from jobs.errors import DiskFull
from jobs.events import EvaluationFinished
from jobs.rundir import RunDir
from worker.training import start
from worker.training.bench import Bench, set_up
from worker.training.checkpoints import checkpoint
from worker.training.checkpoints.saving import is_saved
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.evaluate import evaluate
from worker.training.journal import Journal
from worker.training.loop import steps
from worker.training.machine.device import hold_device, hold_job
from worker.training.machine.neighbours import Neighbours
from worker.training.memory import first_step, hard_limit
from worker.training.memory.evidence import Evidence
from worker.training.models.model_files import read_config
from worker.training.network import guards
from worker.training.network.flops import Flops
from worker.training.network.model import WEIGHTS, weights_of, write_model
from worker.training.planning.ways import Ways
from worker.training.settings import TrainerSettings
from worker.training.steps.limits import Limit
from worker.training.steps.order import StepOrder
from worker.training.stop import Stop, StopAsked
from worker.training.window import fragmented

INTERRUPTED = 75
log = logging.getLogger("longhaul.trainer")


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


def learn(bench: Bench) -> None:
    """All steps that are left, and after each, in this order: log, stop if asked, evaluate, save, clear the cache."""
    spec, state, meter, memory = bench.spec, bench.state, bench.meter, bench.plan.memory
    device, first = bench.cache.device, state.step + 1
    schedule, rows = spec.schedule, bench.data.train
    order = StepOrder(rows, schedule.batch_size, schedule.epochs, schedule.seed)
    ways = Ways(spec, bench.plan, device)
    if first <= order.steps:
        limit = Limit.of(rows, state.micro_batch, state.safe)
        first_step.foresee(device, memory, rows, order.groups_of(state.step), limit, ways)
    saved_at = time.monotonic()
    meter.pace.begin()
    bench.journal.phase("step", step=state.step)
    first_step.begin(device)
    for result in steps(
        bench.loaded.model,
        bench.optimizer,
        rows,
        order,
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
            first_step.tell(bench.journal, device, memory, result, ways)
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
