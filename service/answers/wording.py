"""Each event as one sentence for people, and how loud it is."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from jobs.dataset_report import PreparedSummary
from jobs.events import (
    AnyFact,
    AttemptEnded,
    AttemptStarted,
    CheckpointRejected,
    CheckpointSaved,
    DeviceWaiting,
    DiskLow,
    EvaluationFinished,
    Event,
    Fault,
    JobCancelled,
    JobCancelRequested,
    JobChecked,
    JobFailed,
    JobPaused,
    JobPauseRequested,
    JobPauseWithdrawn,
    JobPrepared,
    JobPriorityChanged,
    JobQueued,
    JobRepaired,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    JobUnprepared,
    JobValidated,
    MemoryMeasured,
    MemoryPlanned,
    ModelLoaded,
    ModelRemoved,
    OomRecovered,
    StepsCorrected,
    TaskStarted,
    TaskSubmitted,
    TaskWaiting,
    UpdateSkipped,
)
from jobs.memory_plan import MemorySummary, describe
from jobs.plan import StepLimit, TimeSummary, limit_words
from jobs.reasons import Reason
from jobs.text.units import bytes_alike, bytes_by_name, format_bytes, format_duration, format_figure, format_share

log = logging.getLogger("longhaul.service")
UNWORDED = Counter(
    "longhaul_events_unworded", "Events shown as raw JSON because they could not be worded.", registry=None
)
_LABELS = 5
"""Named."""
_MANY = 0.03
"""Of all texts: so many that the tokenizer does not know in full are said."""


def sentence(event: Event) -> str:
    """What happened, in plain words, with the figures that matter; an event without words for it as it is."""
    try:
        return _sentence(event.fact, event.attempt)
    except Exception:  # a mistake of ours: nobody who follows may be cut off by it
        log.exception("job %s: event %d cannot be worded and is shown as raw JSON", event.job, event.number)
        UNWORDED.inc()
        return f"{event.type} {event.fact.model_dump_json(exclude={'type'})}"


def _sentence(fact: AnyFact, attempt: int) -> str:
    match fact:
        case JobSubmitted():
            clone = f", a clone of {fact.cloned_from}" if fact.cloned_from else ""
            return f"submitted as {fact.name!r}, model {fact.model}{clone}" + (" (dry run)" if fact.dry_run else "")
        case JobChecked():
            plan = fact.plan
            return (
                f"checked: specification, paths, model and first rows are in order; about {plan.rows_estimated:,} rows "
                f"{f'(read as {plan.read_as}) ' if plan.read_as else ''}"
                f"{f'(from {plan.reading}) ' if plan.reading else ''}"
                + (f"and {plan.steps:,} steps" if plan.steps else "to evaluate the model on")
                + f"{_limit(plan.limited_by)}{_text(plan.time)}{_text(plan.memory)}"
                + (f"; it {plan.resume_from.text}" if plan.resume_from else "")
            )
        case JobPrepared():
            adopted = f" (from {fact.adopted.source} on)" if fact.adopted else ""
            todo = f"{fact.steps:,} steps to train{adopted}" if fact.steps else "the model is to be evaluated"
            return (
                f"prepared: {_prepared(fact.data, fact.rows_per_epoch, trains=fact.steps > 0)}{todo}"
                f"{_limit(fact.limited_by)}{_text(fact.time)}{_text(fact.memory)}{_passed_over(fact)}"
            )
        case JobUnprepared():
            return f"returned to prepare: {fact.message}"
        case JobQueued():
            wait = (
                f"; the next attempt starts in {format_duration(fact.not_before_s)} at the earliest"
                if fact.not_before_s
                else ""
            )
            return f"waits for its turn{wait}"
        case JobPauseRequested():
            return "pause requested: the trainer saves a checkpoint and stops"
        case JobCancelRequested():
            return "cancel requested: the trainer stops"
        case JobPauseWithdrawn():
            return "the pause was withdrawn: the job keeps running"
        case JobPriorityChanged():
            return f"the priority is now {fact.priority}"
        case AttemptStarted():
            box = f" of {fact.box}" if fact.box else ""
            return f"attempt {attempt} started on {fact.gpu_name or fact.device}{box} (worker {fact.worker})"
        case TaskSubmitted():
            return f"handed over to the engine {fact.engine}: its task {fact.task} waits for its turn there"
        case TaskWaiting():
            return f"waiting on the engine: {fact.message}"
        case TaskStarted():
            return f"task {fact.task} of the engine runs on {fact.node}"
        case DeviceWaiting():
            what = "memory of the host" if fact.memory_of_host else "the GPU"
            return f"waiting for {what}: {fact.message}"
        case ModelLoaded():
            begin = f"resuming from step {fact.resumed_step:,}" if fact.resumed_step is not None else "from the start"
            return (
                f"model loaded once: {fact.parameters:,} parameters, {fact.dtype} on {fact.device} "
                f"in {format_duration(fact.seconds)}, {begin}"
            )
        case MemoryPlanned():
            held = fact.other_processes_bytes or 0
            peak, budget, by_others = bytes_alike(fact.peak_bytes, fact.budget_bytes, held)
            others = f", {by_others} held by other processes" if held else ""
            changed = f"; not as planned: {fact.changed}" if fact.changed else ""
            setting = describe(fact.optimizer, fact.activation_checkpointing, fact.micro_batch)
            if fact.evaluation:
                setting = f"evaluation, micro-batch {fact.micro_batch}"
            return f"peak memory {peak}; budget {budget}{others}; {setting}{changed}"
        case MemoryMeasured():
            measured, predicted, peak, budget = bytes_alike(
                fact.measured_bytes, fact.predicted_bytes, fact.peak_bytes, fact.budget_bytes
            )
            return (
                f"step {fact.step:,}: {measured} at the peak, {predicted} predicted; "
                f"at most {peak} expected, of {budget}"
            )
        case EvaluationFinished():
            best = ", the best so far" if fact.best else ""
            judged = f"; {fact.verdict.text}" if fact.verdict is not None else ""
            evaluated = "evaluated" if fact.untrained else f"step {fact.step:,}"
            return f"{evaluated}: {fact.figures_text}{best}{judged}"
        case CheckpointSaved():
            return (
                f"step {fact.step:,}: checkpoint saved ({format_bytes(fact.bytes)} in {format_duration(fact.seconds)})"
            )
        case CheckpointRejected():
            return f"{fact.path} did not verify and was skipped: {fact.message}"
        case DiskLow():
            free, needed = bytes_alike(fact.free_bytes, fact.needed_bytes)
            return (
                f"step {fact.step:,}: checkpoint skipped, the disk is too full for it ({free} free, {needed} needed); "
                "training continues"
            )
        case OomRecovered():
            return _recovered(fact)
        case StepsCorrected(cut=True):
            return (
                f"step {fact.step:,}: the run ends here, and not at step {fact.steps_before:,}: it has become slower, "
                "and the time of training.max_hours is over"
            )
        case StepsCorrected():
            return (
                f"step {fact.step:,}: {fact.steps:,} steps in all{_limit(fact.limited_by)}, by the measured pace of "
                f"{format_duration(fact.step_s)} a step; {fact.steps_before:,} were planned"
            )
        case UpdateSkipped():
            return (
                f"step {fact.step:,}: update skipped, gradients overflowed float16 at a loss scale of "
                f"{fact.loss_scale:,.0f}; it is now {fact.next_loss_scale:,.0f}"
            )
        case AttemptEnded():
            # Nothing but an evaluation is done before step 1.
            at = "" if fact.reason is Reason.DONE and not fact.step else f" {fact.where}"
            return f"attempt {attempt} ended{at}: {_ended(fact)}"
        case JobPaused():
            return "paused until you resume it" if fact.error is None else f"paused: {_cause(fact.error)}"
        case JobResumed(from_scratch=True):
            return "resumed from scratch: waits for its turn, then starts at step 0 without the earlier checkpoints"
        case JobResumed():
            return "resumed: waits for its turn again"
        case JobRepaired():
            lines = f"its last {fact.lines_lost:,} events were" if fact.lines_lost > 1 else "its last event was"
            return (
                f"repaired: {lines} cut off, from the damaged one on, after a backup; the job is as it was before them"
            )
        case JobValidated():
            return "dry run: the job is valid"
        case JobSucceeded():
            loss = f", validation loss {format_figure(fact.loss)}" if fact.loss is not None else ""
            judged = f"; {fact.verdict.text}" if fact.verdict is not None else ""
            if fact.model is None:
                figures = (f"{name} {text}" for name, text in fact.measured.items())
                return ", ".join(["succeeded: the model is evaluated", *figures])
            chosen = f" ({fact.chosen_text})" if fact.chosen_text else ""
            early = "ended early, " if fact.reason is Reason.EARLY_STOPPED else ""
            return f"succeeded: {early}the model of step {fact.step:,}{chosen} is in {fact.model}/{loss}{judged}"
        case JobFailed():
            return f"failed: {_cause(fact.error)}"
        case JobCancelled():
            return "cancelled" + (f"; {fact.checkpoint} is kept" if fact.checkpoint else "")
        case ModelRemoved():
            return "model and checkpoints are removed: its sweep keeps those of its best trial alone"


def _ended(fact: AttemptEnded) -> str:
    """Why; the message of an error may begin with that."""
    sentence, message = fact.reason.sentence, fact.error.message if fact.error else ""
    return message if message.startswith(sentence) else f"{sentence}: {message}" if message else sentence


def _cause(error: Fault) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message


def _recovered(fact: OomRecovered) -> str:
    """Why memory ran out and what was done, as far as the event says."""
    causes = {
        "fragmentation": "free memory was too fragmented",
        "other_processes": "other processes hold memory of the GPU",
        "exhausted": "the step needs more memory than there is",
    }
    cause = f": {causes[fact.cause]}" if fact.cause else ""
    sizes = bytes_by_name(
        {
            "requested": fact.requested_bytes,
            "allocated": fact.allocated_bytes,
            "held by other processes": fact.other_processes_bytes or None,
        }
    )
    figures = f" ({', '.join(sizes)})" if sizes else ""
    how = f"micro-batches of {fact.micro_batch_after} instead of {fact.micro_batch_before}"
    if fact.micro_batch_after == fact.micro_batch_before:
        how = f"the same micro-batches of {fact.micro_batch_before}"
    bucket = f" ({fact.bucket})" if fact.bucket else ""
    return (
        f"step {fact.step:,}: memory ran out{cause}{figures}; the step was redone with {how}{bucket}, "
        f"at a cost of {format_duration(fact.milliseconds_lost / 1000)}"
    )


def _limit(limited_by: StepLimit) -> str:
    """What keeps a run from more steps."""
    return f", {words}" if (words := limit_words(limited_by)) else ""


def _text(planned: TimeSummary | MemorySummary | None) -> str:
    """Of what a run needs."""
    return f"; {planned.text}" if planned and planned.text else ""


def _prepared(data: PreparedSummary, rows_per_epoch: int | None, *, trains: bool) -> str:
    an_epoch = f" ({rows_per_epoch:,} an epoch)" if rows_per_epoch else ""
    parts = [f"{data.train_rows:,} {'training ' if trains else ''}rows{an_epoch}"]
    if data.validation_rows:
        asked, share = data.validation_asked, data.validation_share
        note = ""
        if isinstance(asked, float) and not 0.5 <= share / asked <= 1.5:
            note = f" ({format_share(share)} instead of {format_share(asked)})"
        parts.append(f"{data.validation_rows:,} validation rows{note}")
    if rejected := sum(data.rejected.values()) - data.left_out:
        parts.append(f"{rejected:,} rejected")
    if data.left_out:
        parts.append(f"{data.left_out:,} left out as the file says")
    if data.duplicates:
        parts.append(f"{data.duplicates:,} duplicates left out")
    if cut := data.truncated_inputs + data.truncated_targets:
        parts.append(f"{cut:,} texts truncated")
    if labels := data.labels:
        if labels.validation_only:
            shown = ", ".join(labels.validation_only[:_LABELS])
            parts.append(f"labels that only validation rows have: {shown}")
        if labels.labels_alike:
            shown = "; ".join(" and ".join(map(repr, group)) for group in labels.labels_alike[:_LABELS])
            parts.append(f"labels that look alike: {shown}")
        parts += labels.labels_noticed
        if labels.contradictory_texts:
            parts.append(f"{labels.contradictory_texts:,} texts with different labels")
    many = _MANY * data.kept
    for unknown, side in (data.unknown_inputs, "inputs"), (data.unknown_targets, "targets"):
        if unknown > many:
            parts.append(f"{unknown:,} {side} have characters that the tokenizer does not know")
    if (rewritten := data.rewritten.get("characters rewritten", 0)) > 2 * many:
        parts.append(f"{rewritten:,} texts have characters that were rewritten")
    return "".join(f"{part}, " for part in parts)


def _passed_over(fact: JobPrepared) -> str:
    """Checkpoints of the job that it resumes from which could not be used."""
    defects = fact.adopted.passed_over if fact.adopted else []
    return "".join(f"; skipped: {defect}" for defect in defects)
