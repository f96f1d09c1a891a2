"""What Discord hears of a sweep: one message, edited as trials end.

At the end it is posted anew, so that a phone rings, and the old one is deleted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import cast

from jobs.sweeps.record import SweepRecord, SweepStatus, TrialRecord
from jobs.sweeps.spec import SweepSpec
from jobs.text.units import capitalized, format_share
from worker.sinks.base import DONE, Later, Outcome, SinkSweep
from worker.sinks.discord.edited_message import EditedMessage, MessageNotes
from worker.sinks.discord.embeds import BAD, GOOD, QUIET, RUNNING, fault_fields, field, time_text
from worker.sinks.discord.limits import DiscordOptions, Embed, EmbedField, Payload, cut, fit
from worker.sinks.discord.webhook import Webhook
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


class SweepNotes(MessageNotes, total=False):
    """What is kept with the cursor."""

    told: bool
    """The end is posted."""


def tell(
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
