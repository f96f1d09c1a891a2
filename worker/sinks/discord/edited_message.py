"""A message that is edited in place. Where Discord takes no more edits, a new one comes and the old one is deleted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypedDict

from worker.sinks.base import DONE, Disabled, Later, Outcome
from worker.sinks.discord.limits import Payload
from worker.sinks.discord.webhook import TOO_MANY_EDITS, UNKNOWN_MESSAGE, Answer, Sent, Webhook, WebhookRejected

NEW_MESSAGE_AFTER_S = 50 * 60.0
"""Discord limits edits of messages older than an hour."""
DAY_S = 24 * 3600.0
LATER_FACTOR = 5
"""After its first day a message is edited, and posted anew, so many times more rarely."""
Picture = tuple[str, bytes]
"""Name and bytes of a PNG."""
_NO_MORE_EDITS = (TOO_MANY_EDITS, UNKNOWN_MESSAGE)


class MessageNotes(TypedDict, total=False):
    """What is kept with the cursor. Times are Unix seconds."""

    message: str
    """Id of the message."""
    old: list[str]
    """Ids of messages before it that still have to be deleted."""
    began_at: float
    """When the first message was posted."""
    posted_at: float
    edited_at: float
    pictured: bool
    """It shows a picture."""


class EditedMessage:
    """One message, or what took its place. Cheap to make; what it knows is in `notes`."""

    def __init__(self, webhook: Webhook, notes: MessageNotes, now: Callable[[], float]) -> None:
        self._webhook = webhook
        self._notes = notes
        self._now = now

    @property
    def factor(self) -> int:
        """How much more rarely than on its first day it is edited."""
        return 1 if self._now() - self._notes.get("began_at", self._now()) < DAY_S else LATER_FACTOR

    def since(self, then: float) -> float:
        """Seconds that have passed; infinity where the clock was set back past `then`, so that nothing waits for it."""
        passed = self._now() - then
        return passed if passed >= 0 else math.inf

    def show(
        self,
        payload: Payload,
        picture: Picture | None = None,
        redraw: Callable[[], Picture | None] = lambda: None,
        *,
        anew: bool = False,
        silent: bool = True,
        call: Mapping[str, object] = MappingProxyType({}),
    ) -> Outcome:
        """Edit it; where there is none, or it cannot be edited, or `anew`, post one in its place.

        `picture`: a new one; `redraw` makes one for a new message. It is attached, and not part of the embed: an edit
        of an embed moves its picture out of it, or shows it twice (discord-api-docs issue 5675), unless each edit
        brings the file along.
        """
        notes = self._notes
        answer: Answer = WebhookRejected(0, None)
        young = not anew and "message" in notes
        young = young and self.since(notes["posted_at"]) < NEW_MESSAGE_AFTER_S * self.factor
        if young:
            answer = self._webhook.edit(notes["message"], payload, picture)
            if picture is not None and isinstance(answer, WebhookRejected) and answer.code not in _NO_MORE_EDITS:
                picture = None  # too large, say: the figures matter more
                answer = self._webhook.edit(notes["message"], payload)
        if not young or (isinstance(answer, WebhookRejected) and answer.code in _NO_MORE_EDITS):
            if notes.get("pictured"):
                picture = picture or redraw()
            answer = self._webhook.post(payload, picture, silent=silent, call=call)
            if isinstance(answer, Sent):
                self._posted(answer)
                notes["pictured"] = picture is not None
            elif isinstance(answer, Later) and young:
                notes["posted_at"] = 0.0  # the old message is not tried again
        if isinstance(answer, Later | Disabled):
            return answer
        notes["edited_at"] = self._now()
        notes["pictured"] = notes.get("pictured", False) or picture is not None
        self.delete_old()
        return DONE

    def delete_old(self) -> Later | None:
        """Delete the messages before it; Later where some are left."""
        while old := self._notes.get("old"):
            if isinstance(answer := self._webhook.delete(old[0]), Later):
                return answer
            self._notes["old"] = old[1:]
        return None

    def _posted(self, sent: Sent) -> None:
        notes, now = self._notes, self._now()
        if "message" in notes:
            notes["old"] = [*notes.get("old", []), notes["message"]]
        notes.setdefault("began_at", now)
        notes["message"], notes["posted_at"], notes["edited_at"] = sent.message, now, now
