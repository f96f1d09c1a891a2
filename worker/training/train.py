"""One training attempt, from top to bottom: take the GPU, load once, resume where we were, step, leave a model."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import torch

from jobs.attempt import TrainResult
from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import RankLost, RankSilent, StageError
from jobs.evaluation_metrics import CONFUSION, EvaluationMetric, cost_of, is_better
from jobs.plan import Plan
from jobs.reasons import Reason
from jobs.trainer_facts import EvaluationFinished, UpdateSkipped
from worker.training import start
from worker.training.checkpoints import checkpoint
from worker.training.checkpoints.checkpoint import EvaluationRecord, better_step, newest_is_best
from worker.training.checkpoints.saving import is_saved
from worker.training.context import TrainingContext, set_up
from worker.training.evaluate import evaluate
from worker.training.journal import Journal, StopAsked, StopSignal
from worker.training.loop import steps
from worker.training.machine.device import hold_device, hold_job
from worker.training.machine.numerics import prepare_device
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.memory import first_step, hard_limit
from worker.training.network import guards
from worker.training.planning.alternatives import Alternatives
from worker.training.ranks.group import DIFFERENT, devices_of_ranks
from worker.training.ranks.leader import Leader
from worker.training.ranks.ranks import Alone, Ranks
from worker.training.readme import evaluations_of
from worker.training.result import write_result
from worker.training.settings import TrainerSettings
from worker.training.window import ProgressLog, is_fragmented

INTERRUPTED = 75
log = logging.getLogger("longhaul.trainer")


def train(run: RunDir, settings: TrainerSettings, journal: Journal, stop: StopSignal, attempt: int) -> int:
    """Train until done (exit code 0) or asked to stop (75). Every other typed end is a StageError."""
    device = torch.device(settings.device)
    devices = devices_of_ranks(start.planned(run).resolved.gpus, device)
    guards.check_device(device)
    prepare_device(device)
    trial = run.record().sweep is not None
    reserved = start.reserved_bytes(run.plan()) if trial else None
    limit = hard_limit.limit_of(run.spec().memory, settings.test_memory_limit, reserved)
    with contextlib.ExitStack() as held:

        def start_ranks(plan: Plan) -> Ranks:
            if len(devices) == 1:
                return Alone()
            return held.enter_context(Leader(run, attempt, plan, devices, journal))

        held.enter_context(hold_job(run))
        try:
            held.enter_context(hold_device(run, device, journal, stop, shared=trial))
            monitor = ProcessMonitor.of(device)
            held.enter_context(hard_limit.on_gpu(device, limit))
            with start.loading(run):
                context = set_up(run, device, monitor, journal, stop, attempt, start_ranks, settings.traces)
            held.enter_context(hard_limit.on_host(device, limit, context.loaded, context.optimizer, context.data.train))
            stop.raise_if_asked()
        except StopAsked:
            return report_interrupted(journal)
        try:
            training_loop(context, settings.traces)
            finish(context)
        except StopAsked:  # between two steps or within an evaluation: the last step is whole either way
            save_on_stop(context)
            return report_interrupted(journal)
        finally:  # a good checkpoint of before is worth waiting for, whatever ends the attempt
            context.saver.wait()
    return 0


def training_loop(context: TrainingContext, traces: Path | None) -> None:
    """All steps that are left, and after each, in this order: log, stop if asked, evaluate, save, clear the cache.

    Where the attempt begins, an evaluation and a checkpoint may be due as well. `traces`: as of `Predictor`.
    """
    spec, state, meter, memory = context.spec, context.state, context.meter, context.plan.memory
    device, first = context.cache.device, state.step + 1
    progress = ProgressLog()
    rows, order = context.data.train, context.order
    alternatives = Alternatives(spec, context.plan, device, traces)
    if not context.length.done:
        limit = context.loaded.task.limit(rows, state.micro_batch, state.safe)
        first_step.predict(device, memory, rows, order.groups_of(state.step), limit, alternatives)
    maybe_evaluate_and_save(context)
    meter.pace.begin()
    context.journal.phase("step", step=state.step)
    first_step.begin(device)
    for result in steps(context):
        state.step, state.safe = result.step, dict(result.safe)
        state.evaluated, state.validation_loss, state.metrics, state.verdict = False, None, {}, None
        if result.step == first:
            first_step.report(context.journal, device, memory, result, alternatives)
        if result.scaled is not None and result.scaled.skipped:
            scaled = result.scaled
            context.journal.note(
                UpdateSkipped(step=result.step, loss_scale=scaled.loss_scale, next_loss_scale=scaled.next_scale)
            )
        meter.add(result)
        context.length.correct(context.journal)
        if result.step % spec.log.every_steps == 0 or context.length.done:
            context.optimizer.raise_if_nonfinite()
            context.metrics.write(row := meter.row(result, time.time()))
            progress.add(row, context.length.steps)
            if memory is not None and is_fragmented(row, memory.budget_bytes):
                context.cache.clear()
        context.stop.raise_if_asked()
        maybe_evaluate_and_save(context)
        if spec.memory.empty_cache_steps and result.step % spec.memory.empty_cache_steps == 0:
            context.cache.clear()


def maybe_evaluate_and_save(context: TrainingContext) -> None:
    """Evaluate, then save, if due at this step. Raises StopAsked in an evaluation, which then is still due."""
    if context.due.evaluation:
        evaluate_and_record(context)
    context.saver.poll()
    if context.due.checkpoint:
        context.due.saved()
        if not is_saved(context.run, context.state):
            save(context)


def evaluate_and_record(context: TrainingContext) -> None:
    """Evaluate the weights as they are. Raises StopAsked, leaving everything as it was."""
    state = context.state
    context.optimizer.raise_if_nonfinite()
    seen = evaluate(context)
    context.meter.pace.evaluated(seen.seconds)
    metrics = dict(seen.metrics)
    state.evaluations.append(EvaluationRecord(step=state.step, loss=seen.loss, metrics=metrics))
    best = newest_is_best(state.evaluations, metric := context.spec.checkpoint.best or EvaluationMetric.LOSS)
    lowest = state.best_loss is None or seen.loss < state.best_loss
    if metric == EvaluationMetric.LOSS:
        best = lowest  # an earlier version kept no evaluations but the best
    state.evaluated, state.validation_loss, state.metrics = True, seen.loss, metrics
    if lowest:
        state.best_loss = seen.loss
    if state.step == 0:
        state.first_loss = seen.loss
    context.journal.note(
        fact := EvaluationFinished(
            step=state.step,
            loss=seen.loss,
            rows=seen.rows,
            text_rows=seen.text_rows,
            bleu_of_characters=seen.bleu_of_characters,
            seconds=seen.seconds,
            best=best and context.spec.kind == "train",
            samples=seen.samples,
            metrics=metrics,
            intervals=seen.intervals,
            against_base=seen.against_base,
            judged_by=seen.judged_by,
            base=seen.base,
            against_commonest=seen.against_commonest,
            generated_texts=seen.generated_texts,
            empty_texts=seen.empty_texts,
        )
    )
    state.verdict = fact.verdict
    if seen.confusion is not None and (state.step or context.spec.kind == "evaluate"):  # not of random labels
        write_atomically(context.run.path / CONFUSION, seen.confusion.model_dump_json().encode())
    log.info("step %d: %s", state.step, fact.figures_text)
    context.journal.phase("step", step=state.step)


def save(context: TrainingContext) -> None:
    """Begin to save the weights as they are: training waits only while they are copied, if they are."""
    state = context.state
    context.optimizer.raise_if_nonfinite()
    lost: StageError | None = None
    try:
        context.ranks.check_equal()
    except (RankLost, RankSilent) as error:
        if error.detail_code == DIFFERENT:
            raise
        lost = error  # all that is trained is here, and whole
    state.window, state.unsaved_s = context.meter.synchronize(), context.due.unsaved_s
    context.metrics.sync()  # a run that resumes from this checkpoint does not write those rows again
    began = time.perf_counter()
    context.saver.save(state)
    context.meter.pace.saved(time.perf_counter() - began)
    if lost is not None:
        raise lost  # once that checkpoint is written
    context.journal.phase("step", step=state.step)


def save_on_stop(context: TrainingContext) -> None:
    """Save the weights as they are, unless that checkpoint exists, and wait until it is on disk."""
    context.saver.wait()
    state = context.state
    if state.step and not is_saved(context.run, state):
        save(context)
        context.saver.wait()


def finish(context: TrainingContext) -> None:
    """Leave the best model (or the last) in `model/`, and say that it is done; of an evaluation, this alone."""
    run, state = context.run, context.state
    context.metrics.close()
    if context.spec.kind == "evaluate":
        measured = TrainResult(
            model=None,
            loss=state.validation_loss,
            first_loss=None,
            step=0,
            metrics=state.metrics,
            intervals=evaluations_of(run)[0].intervals,
        )
        context.journal.finish(Reason.DONE, result=measured)
        return
    context.saver.wait()
    metric = context.spec.checkpoint.best
    kept, cost = None, None
    if metric is not None:
        kept, cost = (
            checkpoint.best(run, metric, context.journal),
            cost_of(metric, state.validation_loss, state.metrics),
        )
        there = cost_of(metric, kept.state.validation_loss, kept.state.metrics) if kept is not None else None
        if is_better(cost, there):
            kept = None  # the weights in memory are better: there was no room for a checkpoint of them
        else:
            cost = there
    chosen = kept.state if kept else state
    context.journal.phase("save", step=state.step)
    result = TrainResult(
        model=run.model.name,
        loss=chosen.validation_loss,
        first_loss=state.first_loss,
        step=chosen.step,
        chosen_by=metric if cost is not None else None,
        kept_from=kept_from(context, chosen.step),
        better_step=better_step(state.evaluations, metric, cost) if metric is not None and cost is not None else None,
        metrics=chosen.metrics,
        intervals={} if (seen := evaluations_of(run).get(chosen.step)) is None else seen.intervals,
        verdict=chosen.verdict,
    )
    write_result(context, kept, result)
    context.journal.finish(context.length.reason, result=result)


def kept_from(context: TrainingContext, step: int) -> str | None:
    """The job that was resumed from, if it made this step; None: this job has."""
    source = context.spec.resume_from
    return source.partition("/")[0] if source is not None and 0 < step <= context.length.first else None


def report_interrupted(journal: Journal) -> int:
    """Record it; returns the exit code."""
    journal.finish(Reason.INTERRUPTED)
    log.info("stopped because asked to")
    return INTERRUPTED
