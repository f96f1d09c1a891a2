"""Each event as one sentence for people, and how loud it is."""

from __future__ import annotations

from typing import Any, Literal

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
    JobCancelled,
    JobChecked,
    JobFailed,
    JobPaused,
    JobPrepared,
    JobPrioritised,
    JobQueued,
    JobRequested,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    JobValidated,
    MemoryMeasured,
    MemoryPlanned,
    ModelLoaded,
    OomRecovered,
)

_WARNINGS = (CheckpointRejected, DiskLow, OomRecovered, DeviceWaiting)
_QUIET_ENDS = ("done", "interrupted")
_ENDINGS = {
    "done": "the trainer has finished",
    "interrupted": "the trainer was asked to stop, and did so after a checkpoint",
    "device_busy": "the card was busy",
    "out_of_memory": "the card's memory was not enough, even for the smallest micro-batch",
    "oom_in_optimizer": "memory ran out while the weights were being updated",
    "refused": "the trainer refused",
    "bad_data": "the data cannot be used",
    "non_finite": "the loss or the gradient is no longer a finite number",
    "disk_full": "the disk is full",
    "crash": "the trainer crashed",
    "silent": "the trainer made no progress for too long and was stopped",
    "lost": "the worker was lost",
    "host_out_of_memory": "the machine's main memory ran out",
}


def level(event: Event) -> Literal["info", "warn", "error"]:
    """OpenAI's three levels."""
    fact = event.fact
    if isinstance(fact, JobFailed):
        return "error"
    if isinstance(fact, _WARNINGS) or (isinstance(fact, AttemptEnded) and fact.reason not in _QUIET_ENDS):
        return "warn"
    return "info"


def sentence(event: Event) -> str:
    """What happened, in plain words, with the figures that matter."""
    return _sentence(event.fact, event.attempt)


def _sentence(fact: AnyFact, attempt: int) -> str:
    match fact:
        case JobSubmitted():
            clone = f", a clone of {fact.cloned_from}" if fact.cloned_from else ""
            return f"submitted as {fact.name!r}, model {fact.model}{clone}" + (" (dry run)" if fact.dry_run else "")
        case JobChecked():
            return f"checked: specification, paths, model and first rows are in order{_checked(fact.plan)}"
        case JobPrepared():
            adopted = f" (from {fact.adopted.source} on)" if fact.adopted else ""
            return (
                f"prepared: {_prepared(fact.data)}{fact.steps:,} steps to train{adopted}"
                f"{_text(fact.time)}{_text(fact.memory)}{_passed_over(fact)}"
            )
        case JobQueued():
            wait = f", at the earliest in {fact.not_before_s:.0f} s" if fact.not_before_s else ""
            return f"waits for a card{wait}"
        case JobRequested():
            return {
                "none": "the request was taken back: the job goes on",
                "pause": "a pause is requested: the trainer will checkpoint and stop",
                "cancel": "cancelling is requested: the trainer will stop",
            }[fact.request]
        case JobPrioritised():
            return f"priority {fact.priority} from now on"
        case AttemptStarted():
            return f"attempt {attempt} started on {fact.device} (worker {fact.worker})"
        case DeviceWaiting():
            return f"waiting for the card: {fact.message}"
        case ModelLoaded():
            begin = f"going on from step {fact.resumed_step:,}" if fact.resumed_step is not None else "from the start"
            return (
                f"model loaded once: {fact.parameters:,} parameters, {fact.dtype} on {fact.device} "
                f"in {fact.seconds:.1f} s, {begin}"
            )
        case MemoryPlanned():
            others = f", {_size(fact.foreign_bytes)} held by other processes" if fact.foreign_bytes else ""
            changed = f"; not as planned: {fact.changed}" if fact.changed else ""
            return (
                f"memory: {_size(fact.peak_bytes)} at the peak of {_size(fact.budget_bytes)}{others}, micro-batch "
                f"{fact.micro_batch}, {fact.optimizer}, recomputing {_layers(fact.recompute_layers)}{changed}"
            )
        case MemoryMeasured():
            return (
                f"step {fact.step:,}: {_size(fact.measured_bytes)} at the peak, {_size(fact.predicted_bytes)} "
                f"predicted; at most {_size(fact.peak_bytes)} to come, of {_size(fact.budget_bytes)}"
            )
        case EvaluationFinished():
            best = ", the best so far" if fact.best else ""
            return f"step {fact.step:,}: validation loss {fact.loss:.4f} over {fact.rows:,} rows{best}"
        case CheckpointSaved():
            return f"step {fact.step:,}: checkpoint saved ({_size(fact.bytes)} in {fact.seconds:.1f} s)"
        case CheckpointRejected():
            return f"{fact.path} did not verify and was passed over: {fact.message}"
        case DiskLow():
            return (
                f"step {fact.step:,}: no checkpoint for want of room ({_size(fact.free_bytes)} free, "
                f"{_size(fact.needed_bytes)} needed); training goes on"
            )
        case OomRecovered():
            return _recovered(fact)
        case AttemptEnded():
            cause = f": {fact.error.message}" if fact.error else ""
            return f"attempt {attempt} ended at step {fact.step:,}: {_ENDINGS[fact.reason]}{cause}"
        case JobPaused():
            return "paused; resume it when you like"
        case JobResumed():
            return "resumed: waits for a card again"
        case JobValidated():
            return "dry run: nothing is wrong with this job"
        case JobSucceeded():
            loss = f", validation loss {fact.loss:.4f}" if fact.loss is not None else ""
            return f"succeeded: the model of step {fact.step:,} is in {fact.model}/{loss}"
        case JobFailed():
            hint = f" ({fact.error.hint})" if fact.error.hint else ""
            return f"failed: {fact.error.message}{hint}"
        case JobCancelled():
            return "cancelled" + (f"; {fact.checkpoint} is kept" if fact.checkpoint else "")


def _recovered(fact: OomRecovered) -> str:
    """Why memory ran out and what was done, as far as the event says."""
    causes = {
        "fragmentation": "free memory was in pieces too small",
        "foreign": "other processes hold memory of the card",
        "exhausted": "there is too little",
    }
    cause = f": {causes[fact.cause]}" if fact.cause else ""
    sizes = [
        *([f"{_size(fact.requested_bytes)} asked for"] if fact.requested_bytes is not None else []),
        *([f"{_size(fact.allocated_bytes)} allocated"] if fact.allocated_bytes is not None else []),
        *([f"{_size(fact.foreign_bytes)} held by others"] if fact.foreign_bytes else []),
    ]
    told = f" ({', '.join(sizes)})" if sizes else ""
    how = f"micro-batches of {fact.micro_batch_after} instead of {fact.micro_batch_before}"
    if fact.micro_batch_after == fact.micro_batch_before:
        how = f"the same micro-batches of {fact.micro_batch_before}"
    bucket = f" ({fact.bucket})" if fact.bucket else ""
    return (
        f"step {fact.step:,}: memory ran out{cause}{told}; the step was redone with {how}{bucket}, "
        f"and nothing was lost but {fact.milliseconds_lost / 1000:.1f} s"
    )


def _checked(plan: dict[str, Any]) -> str:
    rows, steps = plan.get("rows_estimated"), plan.get("steps")
    size = f"; about {rows:,} rows and {steps:,} steps" if rows and steps else ""
    return size + _text(plan.get("time")) + _text(plan.get("memory"))


def _text(planned: dict[str, Any] | None) -> str:
    """Of what a run needs: of time, of memory."""
    text = planned.get("text") if planned else None
    return f"; {text}" if text else ""


def _prepared(data: dict[str, Any]) -> str:
    parts = []
    if "train_rows" in data:
        parts.append(f"{data['train_rows']:,} rows to learn from")
    if data.get("validation_rows"):
        parts.append(f"{data['validation_rows']:,} held out")
    if aside := sum(data.get("set_aside", {}).values()):
        parts.append(f"{aside:,} set aside as unusable")
    if cut := data.get("truncated_inputs", 0) + data.get("truncated_targets", 0):
        parts.append(f"{cut:,} texts cut to fit")
    return "".join(f"{part}, " for part in parts)


def _passed_over(fact: JobPrepared) -> str:
    """Checkpoints of the job that it goes on from which could not be used."""
    defects = fact.adopted.passed_over if fact.adopted else []
    return "".join(f"; passed over: {defect}" for defect in defects)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _layers(every: int) -> str:
    return {0: "nothing", 1: "every layer"}.get(every, f"every {every}. layer")
