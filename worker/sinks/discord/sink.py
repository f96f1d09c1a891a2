"""Discord: one progress message per job, edited in place; new messages only for what a person should notice. That of
an attempt that fails becomes the message of the failure.

A phone rings for what needs a person (no usable GPU, low disk, a damaged run directory, a failure, a pause of the job's
own making) and for the end of training or of a sweep. Posted silently: the time that the job needs, the first
out-of-memory error, a failure that is tried again, a repair, and what a person did (pause, cancel). All else is an
edit. Discord limits edits of old messages: then the progress message is deleted and posted anew, silently. The footer
names job, attempt and event, so that a repeat after a crash is recognizable.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, cast

from jobs.errors import Damaged, UserError
from jobs.events import (
    AttemptEnded,
    AttemptStarted,
    Event,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPrepared,
    JobQueued,
    JobRepaired,
    JobResumed,
    JobSubmitted,
    JobSucceeded,
    TaskStarted,
    TaskSubmitted,
    TaskWaiting,
)
from jobs.metrics import MetricRow
from jobs.sweeps.record import SweepRecord, SweepStatus, TrialRecord
from jobs.sweeps.spec import SweepSpec
from jobs.text.units import capitalized, format_parameters, format_share
from jobs.trainer_facts import DeviceWaiting, DiskLow, Fact, ModelLoaded, OomRecovered
from worker.sinks.base import DONE, Disabled, Later, Outcome, SinkJob, SinkSettings, SinkSweep
from worker.sinks.curve import FILE_NAME, draw_job
from worker.sinks.discord import embeds
from worker.sinks.discord.edited_message import DAY_S, EditedMessage, MessageNotes, Picture
from worker.sinks.discord.embeds import BAD, GOOD, QUIET, RUNNING, fault_fields, field, time_text
from worker.sinks.discord.limits import FILE_BYTES, DiscordOptions, Embed, EmbedField, Payload, cut, fit
from worker.sinks.discord.webhook import GoneFile, Webhook, WebhookRejected
from worker.sinks.wording import bar, code

ENDINGS = {
    "done": "All trials have ended.",
    "max_hours": "The time limit (`max_hours`) was reached.",
    "failures": "Too many trials in a row failed with the same cause.",
    "cancelled": "It was cancelled.",
}
KINDS: dict[SweepStatus, str] = {
    "running": "progress", "succeeded": "done", "failed": "failed", "cancelled": "cancelled",
}  # fmt: skip
"""Of messages, as LONGHAUL_DISCORD_EVENTS names them."""
_COLOURS: dict[SweepStatus, int] = {"running": RUNNING, "succeeded": GOOD, "failed": BAD, "cancelled": QUIET}
_STATUSES = ("succeeded", "pruned", "failed", "cancelled", "running")
MOST_CAUSES = 3
CAUSE_TEXT = 250
SETTINGS_TEXT = 900


# -- a sweep: one message, edited as trials end, and posted anew at the end ----------------------------------


class SweepNotes(MessageNotes, total=False):
    """What is kept with the cursor."""

    told: bool
    """The end is posted."""


def tell_sweep(
    sweep: SinkSweep, webhook: Webhook, options: DiscordOptions, now: Callable[[], float], every_s: float
) -> Outcome:
    """Bring the message up to date, every `every_s` at most."""
    notes = cast("SweepNotes", sweep.state)
    message = EditedMessage(webhook, notes, now)
    status = sweep.record.status
    ends = status != "running"
    if notes.get("told"):
        return message.delete_old() or DONE
    if "message" in notes and not ends:
        every, passed = every_s * message.factor, message.since(notes["edited_at"])
        if passed < every:
            return Later(every - passed, "coalescing progress")
    anew = ends and KINDS[status] in options.kinds
    if not anew and "progress" not in options.kinds:
        return DONE
    call = options.call() if status == "failed" else {}
    payload = sweep_payload(sweep.spec, sweep.record, options)
    outcome = message.show(payload, anew=anew, silent=status in ("running", "cancelled"), call=call)
    if outcome == DONE and ends:
        notes["told"] = True
        return message.delete_old() or DONE
    return outcome


def sweep_payload(spec: SweepSpec, record: SweepRecord, options: DiscordOptions) -> Payload:
    """How it stands: trials by outcome, the best, causes of failure; at the end why it ended."""
    ended = len(record.finished)
    lines = [f"`{bar(ended / spec.most_trials)}` {ended:,} of {spec.most_trials:,} trials ended"]
    lines += [] if record.ended is None else [ENDINGS[record.ended.reason]]
    counts = record.counts
    lines.append(" · ".join(f"{counts[status]:,} {status}" for status in _STATUSES if status in counts))
    title = f"{record.name}: sweep {'runs' if record.ended is None else record.status}"
    embed: Embed = {"title": title, "color": _COLOURS[record.status], "description": "\n".join(filter(None, lines))}
    if link := options.sweep_link(record.id):
        embed["url"] = link
    fields = [] if record.ended is None or record.ended.error is None else fault_fields(record.ended.error)
    best = record.best(higher_is_better=spec.by.higher_is_better)
    fields += [] if best is None else _best(spec, best, options, ended=record.ended is not None)
    fields += _causes(record)
    if record.ended is not None and record.importances:
        shares = ", ".join(f"{key} {format_share(share)}" for key, share in record.importances.items())
        fields.append(field("Importance of the parameters", shares))
    embed["fields"] = fields
    embed["footer"] = {"text": f"{record.id} · event {record.number}"}
    embed["timestamp"] = time_text(record.at)
    return {"embeds": fit([embed])}


def _best(spec: SweepSpec, best: TrialRecord, options: DiscordOptions, *, ended: bool) -> list[EmbedField]:
    assert best.value is not None, "the best trial has a value"
    figure = f"{capitalized(spec.by.words)} {spec.by.figure(best.value)}"
    settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in best.settings.items())
    fields = [
        field("Best trial" if ended else "Best so far", f"{figure} (trial {best.number})", inline=True),
        field("Its settings", code(cut(settings, SETTINGS_TEXT))),
    ]
    job = best.jobs[0]
    link = options.link(job)
    where = f"[its page]({link}), or " if link else ""
    return [*fields, field("Its model", f"{where}`longhaul download {job}`")] if ended else fields


def _causes(record: SweepRecord) -> list[EmbedField]:
    """Why trials failed, the most frequent causes first, each with the newest message."""
    errors = [record.trials[number].error for number in record.finished]
    found = {error.code: error.message for error in errors if error is not None}
    often = Counter(error.code for error in errors if error is not None).most_common(MOST_CAUSES)
    lines = [f"{count:,} × `{name}`: {cut(' '.join(found[name].split()), CAUSE_TEXT)}" for name, count in often]
    return [field("Failed", "\n".join(lines))] if lines else []


EDIT_EVERY_S = 15.0
RING_AGAIN_S, RING_FACTOR = 4 * DAY_S, 4
"""A phone that rang for a warning rings for one of its kind again after so long, then after so many times as long."""
WAITS_TOLD = 3
"""Reasons why a job waits for a GPU that have a message, until the next attempt begins."""
PICTURE_EVERY_S = 10 * 60.0
"""The curve in the progress message is drawn anew."""
MOST_READ_BYTES = 64 << 20
"""Of rows of metrics, for a curve on the way; at the end all are read."""

log = logging.getLogger("longhaul.discord")


# -- a job ---------------------------------------------------------------------------------------------------


class DiscordNotes(MessageNotes, total=False):
    """What is kept with the cursor. The message is that of progress."""

    pictured_at: float
    """When the curve was last drawn for the progress message."""
    over: bool
    """It is edited no more."""
    owed: bool
    """It still says that an attempt trains which has failed: the message of what follows takes its place."""
    ooms: int
    """Recovered from in this attempt. The first has a message."""
    skipped: int
    """Checkpoints for want of room, in this attempt. The first has a message."""
    waits: int
    """For a GPU, told since the last attempt began."""
    rang: dict[str, tuple[int, float]]
    """How often a phone rang for each kind of warning, and when last."""


_OF_THE_JOB = ("message", "old", "began_at", "posted_at", "edited_at", "pictured_at", "pictured", "rang")
"""Notes that outlive an attempt."""


EVERYTHING = DiscordOptions()
_AFTER_A_FAILURE = {"warnings", "paused", "failed", "cancelled"}
"""Kinds of the message that follows the end of a failed attempt: if it is sent, that end needs none."""
_KINDS: dict[type[Fact], str] = {
    JobPrepared: "plan",
    OomRecovered: "warnings",
    DiskLow: "warnings",
    DeviceWaiting: "warnings",
    JobQueued: "warnings",
    JobRepaired: "warnings",
    JobSucceeded: "done",
    JobFailed: "failed",
    JobPaused: "paused",
    JobCancelled: "cancelled",
}
"""Kinds of message, by what happened; all else is in the progress message."""


def make(settings: SinkSettings) -> DiscordSink:
    """From the environment. ValueError names a variable that is wrong; with a wrong webhook nothing is sent."""
    variables = settings.variables
    options = DiscordOptions.of(
        variables.get("LONGHAUL_DISCORD_EVENTS"), variables.get("LONGHAUL_DISCORD_MENTION"), settings.public_url
    )
    webhook = None
    if url := variables.get("DISCORD_WEBHOOK"):
        try:
            webhook = Webhook(url, gone_file=GoneFile(settings.runs / ".publish" / "discord.json"))
        except UserError as error:
            # Reconcile lives in this process too: a wrong address must not take it down.
            log.error("nothing is sent to Discord: %s; %s", error, error.hint)
    return DiscordSink(webhook, options=options)


class DiscordSink:
    """Accepts jobs, if there is a webhook."""

    name = "discord"
    follows_metrics = True

    def __init__(
        self,
        webhook: Webhook | None,
        now: Callable[[], float] = time.time,
        edit_every_s: float = EDIT_EVERY_S,
        options: DiscordOptions = EVERYTHING,
    ) -> None:
        self._webhook = webhook
        self._options = options
        self._now = now
        self._edit_every_s = edit_every_s

    def __repr__(self) -> str:
        return f"DiscordSink({self._webhook!r})"

    def accepts(self, submitted: JobSubmitted) -> bool:
        """Who makes a dry run waits for its answer; trials are in the message of their sweep."""
        told_elsewhere = submitted.dry_run or submitted.sweep is not None
        return self._webhook is not None and not told_elsewhere

    def event(self, event: Event, job: SinkJob) -> Outcome:
        """At most one call to Discord, but for an event that cannot be worded: that one is sent as it is."""
        if not self._wants(event, job):
            if isinstance(event.fact, AttemptStarted):
                self._begin(job)
            return DONE
        try:
            return self._event(event, job)
        except OSError:  # of the disk: the feed tries again
            raise
        except Exception:
            log.exception("job %s: event %d cannot be worded and is sent as raw JSON", job.id, event.number)
            return self._post(job.id, embeds.unworded(job, event))

    def _wants(self, event: Event, job: SinkJob) -> bool:
        match event.fact:
            case OomRecovered() | DiskLow():  # counted in the progress message, at least
                return True
            case DeviceWaiting() if not _notes(job).get("over", True):
                return "progress" in self._options.kinds
            case JobQueued() if job.failed_attempt is None:
                return "progress" in self._options.kinds
            case fact:
                return _KINDS.get(type(fact), "progress") in self._options.kinds

    def _event(self, event: Event, job: SinkJob) -> Outcome:
        match event.fact:
            case JobPrepared() as fact if job.time is not None:
                return self._post(job.id, embeds.planned(job, event, fact), silent=True)
            case AttemptStarted() as fact:
                return self._start(event, fact, job)
            case ModelLoaded() as fact:
                what, where = "training" if job.steps else "evaluation", "CPU" if fact.device == "cpu" else "GPU"
                how = "begins" if fact.resumed_step is None else f"continues from step {fact.resumed_step:,}"
                note = f"Loaded {format_parameters(fact.parameters)} parameters on the {where}; {what} {how}."
                return self._edit(job, note, event)
            case TaskSubmitted() | TaskWaiting() | TaskStarted() as fact:
                return self._edit(job, embeds.task_note(fact), event)
            case DeviceWaiting(memory_of_host=True):
                return DONE  # the end of the attempt has said it
            case DeviceWaiting(available=True) as fact:
                return self._post(job.id, embeds.gpu_again(job, event, fact), silent=True)
            case DeviceWaiting() as fact if _notes(job).get("over", True):  # no attempt has begun: nobody has a GPU
                return self._wait(job, embeds.no_gpu(job, event, fact))
            case DeviceWaiting() as fact:
                return self._edit(job, capitalized(fact.message), event)
            case OomRecovered() as fact:
                return self._count("ooms", job, embeds.out_of_memory(job, event, fact))
            case DiskLow() as fact:
                return self._count("skipped", job, embeds.disk_low(job, event, fact))
            case AttemptEnded() as fact:
                return self._end_attempt(event, fact, job)
            case JobQueued() as fact if job.failed_attempt is not None:
                return self._in_its_place(job, embeds.retry(job, event, fact, job.failed_attempt))
            case JobQueued() as fact if job.ended is not None and "message" in _notes(job):
                return self._replace(
                    job, embeds.ended(job, event, job.ended, [*_counted(job), embeds.next_attempt(job, fact)])
                )
            case JobResumed():
                _notes(job)["posted_at"] = 0.0  # the next attempt's message stands below the one that says "paused"
                return DONE
            case JobRepaired() as fact:
                return self._post(job.id, embeds.repaired(job, event, fact), silent=True)
            case JobSucceeded() as fact:
                picture = self._picture(job)
                link = self._options.link(job.id)
                return self._post(job.id, embeds.succeeded(job, event, fact, picture and picture[0], link), picture)
            case JobFailed() if job.steps is None and not job.attempt:
                return DONE  # rejected by check: whoever submitted it has just been told
            case JobFailed() as fact:
                picture = self._picture(job)
                payload = embeds.failed(job, event, fact, picture and picture[0])
                return self._in_its_place(job, payload, picture, person=True)
            case JobCancelled() as fact:
                return self._in_its_place(job, embeds.cancelled(job, event, fact))
            case JobPaused() as fact:
                return self._in_its_place(job, embeds.paused(job, event, fact), person=fact.error is not None)
            case _:
                return DONE

    def metrics(self, rows: Sequence[MetricRow], job: SinkJob) -> Outcome:
        """Show the newest row, at most every `edit_every_s`. Rows held back are covered by later ones."""
        notes = _notes(job)
        if job.ending or notes.get("over", True) or rows[-1].attempt != job.attempt:
            return DONE  # the next message says more, or there is no message to edit
        message = self._message(job)
        every, passed = self._edit_every_s * message.factor, message.since(notes["edited_at"])
        if passed < every:
            return Later(every - passed, "coalescing progress")
        return self._edit(job, "", None)  # it trains: what was said before is over

    def damaged(self, job: str, submitted: JobSubmitted | None, error: Damaged) -> Outcome:
        """A message of its own, unless the job wants no Discord, or is a trial."""
        quiet = submitted is not None and (not submitted.discord or submitted.sweep is not None)
        if self._webhook is None or quiet:
            return DONE
        if "warnings" not in self._options.kinds:
            return DONE
        return self._post(job, embeds.damaged(job, submitted, error), person=True)

    def accepts_sweep(self, spec: SweepSpec) -> bool:
        """All, if there is a webhook."""
        return self._webhook is not None

    def sweep(self, sweep: SinkSweep) -> Outcome:
        """One message for the sweep."""
        return tell_sweep(sweep, self._call(), self._options, self._now, self._edit_every_s)

    def close(self, job: SinkJob) -> None:
        """Nothing is held."""

    def _start(self, event: Event, fact: AttemptStarted, job: SinkJob) -> Outcome:
        outcome = self._replace(job, embeds.progress(job, embeds.started_note(fact), event))
        if isinstance(outcome, Later | Disabled):
            return outcome
        self._begin(job)
        return DONE

    def _begin(self, job: SinkJob) -> None:
        """Nothing is known of this attempt yet."""
        kept = {key: job.state[key] for key in _OF_THE_JOB if key in job.state}
        job.state.clear()
        over = "message" not in kept or "progress" not in self._options.kinds
        job.state.update(kept, over=over)

    def _message(self, job: SinkJob) -> EditedMessage:
        return EditedMessage(self._call(), _notes(job), self._now)

    def _edit(self, job: SinkJob, note: str, event: Event | None) -> Outcome:
        """Put the progress message up to date."""
        if _notes(job).get("over", True):
            return DONE
        return self._replace(job, embeds.progress(job, "\n".join(filter(None, [note, *_counted(job)])), event))

    def _replace(self, job: SinkJob, payload: Payload) -> Outcome:
        """Edit the progress message; where there is none, or it cannot be edited, a new one comes in its place."""
        before = _notes(job).get("message")
        self._link(job.id, payload)
        outcome = self._message(job).show(payload, self._new_picture(job), lambda: self._picture(job))
        if _notes(job).get("message") != before:
            _notes(job)["over"] = False
        return outcome

    def _count(self, counter: Literal["ooms", "skipped"], job: SinkJob, payload: Payload) -> Outcome:
        """The first of an attempt has a message, and one for which a phone rings; the progress message counts all."""
        before = _notes(job).get(counter, 0)
        outcome: Outcome = DONE
        rings = counter == "skipped" and self._rings(job, counter)
        if (rings or not before) and "warnings" in self._options.kinds:
            outcome = self._warn(job, payload, counter, rings)
        if not isinstance(outcome, Later):
            _notes(job)[counter] = before + 1
        return outcome

    def _wait(self, job: SinkJob, payload: Payload) -> Outcome:
        told, rings = _notes(job).get("waits", 0), self._rings(job, "waits")
        outcome = self._warn(job, payload, "waits", rings) if rings or told < WAITS_TOLD else DONE
        if not isinstance(outcome, Later):
            _notes(job)["waits"] = told + 1
        return outcome

    def _rings(self, job: SinkJob, kind: str) -> bool:
        """Whether a phone may ring for this kind of warning: a fault that comes and goes wakes nobody each day."""
        times, at = _notes(job).get("rang", {}).get(kind, (0, 0.0))
        return times == 0 or self._message(job).since(at) >= RING_AGAIN_S * RING_FACTOR ** (times - 1)

    def _warn(self, job: SinkJob, payload: Payload, kind: str, rings: bool) -> Outcome:
        outcome = self._post(job.id, payload, silent=not rings, person=rings)
        if rings and not isinstance(outcome, Later):
            rang = _notes(job).get("rang", {})
            _notes(job)["rang"] = {**rang, kind: (rang.get(kind, (0, 0.0))[0] + 1, self._now())}
        return outcome

    def _end_attempt(self, event: Event, fact: AttemptEnded, job: SinkJob) -> Outcome:
        outcome: Outcome = DONE
        followed = fact.reason.severity == "error" and self._options.kinds >= _AFTER_A_FAILURE
        if not _notes(job).get("over", True) and followed:
            _notes(job)["owed"] = True
        elif not _notes(job).get("over", True):
            _notes(job)["pictured_at"] = 0.0  # the curve is drawn to its end
            outcome = self._replace(job, embeds.ended(job, event, fact, _counted(job)))
        if not isinstance(outcome, Later):
            _notes(job)["over"] = True
        return outcome

    def _in_its_place(
        self, job: SinkJob, payload: Payload, picture: Picture | None = None, *, person: bool = False
    ) -> Outcome:
        """A message that stays: in place of that of a failed attempt, if there is one, or of its own. `person`:
        somebody has to do something, and a phone rings for no edit."""
        notes = _notes(job)
        if person or not notes.get("owed"):
            outcome = self._post(job.id, payload, picture, silent=not person, person=person)
        else:
            self._link(job.id, payload)
            outcome = self._message(job).show(payload)
        if notes.get("owed") and not isinstance(outcome, Later):
            if person:
                notes["old"] = [*notes.get("old", []), notes["message"]]
                self._message(job).delete_old()
            for note in ("message", "pictured", "owed"):  # the next attempt has a message of its own, below
                job.state.pop(note, None)
        return outcome

    def _post(
        self,
        job: str,
        payload: Payload,
        picture: Picture | None = None,
        *,
        silent: bool = False,
        person: bool = False,
    ) -> Outcome:
        """A message of its own. `person`: somebody has to do something."""
        self._link(job, payload)
        call = self._options.call() if person else {}
        answer = self._call().post(payload, picture, silent=silent, call=call)
        if isinstance(answer, WebhookRejected) and answer.status == 413 and picture is not None:
            for embed in payload["embeds"]:
                embed.pop("image", None)
            answer = self._call().post(payload, call=call)
        # A WebhookRejected is in the log, with its reason.
        return answer if isinstance(answer, Later | Disabled) else DONE

    def _link(self, job: str, payload: Payload) -> None:
        """The title leads to the job."""
        if (link := self._options.link(job)) is not None:
            payload["embeds"][0]["url"] = link

    def _new_picture(self, job: SinkJob) -> Picture | None:
        """The curve so far, if the message has none, or an old one."""
        message = self._message(job)
        since = message.since(_notes(job).get("pictured_at", 0.0))
        if job.latest is None or since < PICTURE_EVERY_S * message.factor or job.size_of_rows() > MOST_READ_BYTES:
            return None
        _notes(job)["pictured_at"] = self._now()
        return self._picture(job)

    def _picture(self, job: SinkJob) -> Picture | None:
        try:
            picture = draw_job(job)
        except Exception:
            log.exception("job %s: the loss curve could not be drawn", job.id)
            return None
        return (FILE_NAME, picture) if picture is not None and len(picture) <= FILE_BYTES else None

    def _call(self) -> Webhook:
        assert self._webhook is not None, "a job was accepted without a webhook"
        return self._webhook


def _notes(job: SinkJob) -> DiscordNotes:
    return cast("DiscordNotes", job.state)


def _counted(job: SinkJob) -> list[str]:
    """What happened again and again in this attempt, a line each."""
    ooms, skipped = _notes(job).get("ooms", 0), _notes(job).get("skipped", 0)
    lines = []
    if ooms:
        times = "once in this attempt; the" if ooms == 1 else f"{ooms:,} times in this attempt; each time the"
        lines.append(f"Memory ran out {times} step was repeated, and nothing was lost.")
    if skipped:
        were = "1 checkpoint was" if skipped == 1 else f"{skipped:,} checkpoints were"
        lines.append(f"{were} skipped in this attempt: the disk is nearly full.")
    return lines
