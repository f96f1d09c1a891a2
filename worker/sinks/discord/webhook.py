"""A Discord webhook over HTTP: one call at a time, rate limits kept, every answer typed, the token never shown.

Source: Discord's API documentation (Webhook resource, Rate Limits).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import requests

from jobs.errors import UserError
from jobs.version import VERSION
from worker.sinks.base import Disabled, Later
from worker.sinks.discord.limits import Payload

# -- gone --------------------------------------------------------------------------------------------------------------
# What is remembered of a webhook that is gone, so that a restart does not ask Discord again (architecture.md: Sinks).
#
# Discord bans addresses that keep asking for what is not there. The file holds a hash, never the URL: reading
# the runs directory must not allow posting to the channel. A token is long and random, so a hash does not reveal it.

log = logging.getLogger("longhaul.discord")


class GoneFile:
    """`runs/.publish/discord.json`: the last webhook found gone. Another DISCORD_WEBHOOK is not concerned by it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def why(self, url: str) -> str | None:
        """Why this webhook is gone; None if nothing is known against it."""
        try:
            known = json.loads(self.file.read_bytes())
            return str(known["why"]) if known["webhook_sha256"] == _sha256(url) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read and is skipped: %r", self.file, error)
            return None

    def remember(self, url: str, why: str) -> None:
        """Keep it for the next start. A disk that does not take it costs one more question then."""
        temporary = self.file.with_name(f".{self.file.name}")
        try:
            self.file.parent.mkdir(exist_ok=True)
            temporary.write_text(json.dumps({"webhook_sha256": _sha256(url), "why": why}) + "\n")
            os.replace(temporary, self.file)
        except OSError as error:
            log.warning("%s cannot be written: %s", self.file, error)


def _sha256(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()


# -- webhook -----------------------------------------------------------------------------------------------------------

USER_AGENT = f"DiscordBot (longhaul, {VERSION}) Longhaul"
TIMEOUT_S = (5.0, 10.0)
"""To connect; between two bytes of the answer."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0

UNKNOWN_MESSAGE = 10008
TOO_MANY_EDITS = 30046
UNKNOWN_WEBHOOK = 10015
SUPPRESS_NOTIFICATIONS = 1 << 12
"""A flag of a message."""
INVALID_TOKEN = 50027

_DISCORD = re.compile(
    r"https://(?:(?:ptb|canary)\.)?(?:discord|discordapp)\.com/api(?:/v\d{1,2})?/webhooks/(\d{1,20})/([\w\-]+)/?"
)
_LOOPBACK = re.compile(
    r"http://(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?/api(?:/v\d{1,2})?/webhooks/(\d{1,20})/([\w\-]+)/?"
)


@dataclass(frozen=True)
class Sent:
    """Discord has the message."""

    message: str


@dataclass(frozen=True)
class WebhookRejected:
    """Discord will never take this request, though the webhook is alive."""

    status: int
    code: int | None
    """Discord's own error code, such as 30046."""


@dataclass(frozen=True)
class DiscordReply:
    """What the body of an answer says."""

    id: str = ""
    """Of the message."""
    code: int | None = None
    """Discord's own error code."""
    retry_after_s: float | None = None
    detail: str = ""
    """Code and message, for the log."""


Answer = Sent | WebhookRejected | Later | Disabled


class Webhook:
    """One webhook. Knows when it may call again, and whether it is gone for good."""

    def __init__(
        self,
        url: str,
        clock: Callable[[], float] = time.monotonic,
        timeout_s: tuple[float, float] = TIMEOUT_S,
        gone_file: GoneFile | None = None,
    ) -> None:
        """Raises UserError when `url` is not a webhook's. What `gone_file` knows to be gone is not asked again."""
        self._url, self._id, self._token = check_url(url)
        self._clock = clock
        self._timeout_s = timeout_s
        self._not_before = 0.0
        self._failures = 0
        self.gone: Disabled | None = None
        """Why nothing is sent any more."""
        self._gone_file = gone_file
        if gone_file is not None and (why := gone_file.why(self._url)) is not None:
            self.gone = Disabled(why)
            log.error("webhook %s: %s, at an earlier start; nothing is sent to it. Make a new webhook, set "
                      "DISCORD_WEBHOOK and restart publish (or remove %s)", self._id, why, gone_file.file)  # fmt: skip
        self._session = requests.Session()
        self._session.headers["User-Agent"] = USER_AGENT
        if _LOOPBACK.fullmatch(url):
            self._session.trust_env = False  # a proxy knows another loopback
        # urllib3 writes paths, and so the token, to its debug log.
        logging.getLogger("urllib3.connectionpool").addFilter(self._mask_record)

    def __repr__(self) -> str:
        return f"Webhook({self._id}, token masked)"

    def post(
        self,
        payload: Payload,
        picture: tuple[str, bytes] | None = None,
        *,
        silent: bool = False,
        call: Mapping[str, object] = MappingProxyType({}),
    ) -> Answer:
        """A new message, with a PNG of that name attached. `silent`: no phone rings. `call`: whom it mentions."""
        message = {**payload, **call} | ({"flags": SUPPRESS_NOTIFICATIONS} if silent else {})
        return self._call("POST", f"{self._url}?wait=true", message, picture)

    def edit(self, message: str, payload: Payload, picture: tuple[str, bytes] | None = None) -> Answer:
        """Replace what an earlier message says; a PNG takes the place of the one attached, which else stays."""
        # `attachments` names those to keep: the new one alone, by its place among the files.
        files = {} if picture is None else {"attachments": [{"id": "0", "filename": picture[0]}]}
        return self._call("PATCH", f"{self._url}/messages/{message}", {**payload, **files}, picture)

    def delete(self, message: str) -> Answer:
        """Remove an earlier message."""
        return self._call("DELETE", f"{self._url}/messages/{message}", None, None)

    def _call(
        self, method: str, url: str, payload: Mapping[str, object] | None, picture: tuple[str, bytes] | None
    ) -> Answer:
        if self.gone is not None:
            return self.gone
        wait = self._not_before - self._clock()
        if wait > 0:
            return Later(wait, "rate limit or backing off")
        message = None if payload is None else {"allowed_mentions": {"parse": []}, **payload}
        try:
            answer = self._session.request(
                method,
                url,
                json=message if picture is None else None,
                data=picture and {"payload_json": json.dumps(message)},
                files=picture and {"files[0]": (*picture, "image/png")},
                timeout=self._timeout_s,
                allow_redirects=False,
            )
        except requests.RequestException as error:
            # Its text holds the URL, and so the token.
            return self._back_off(f"{type(error).__name__}: {self._masked(str(error))}")
        return self._classify(method, answer)

    def _classify(self, method: str, answer: requests.Response) -> Answer:
        reply = self._read(answer)
        self._apply_rate_limit(answer)
        if answer.ok and (reply.id or method == "DELETE"):
            self._failures = 0
            return Sent(reply.id)
        if answer.status_code == 429 and reply.code != TOO_MANY_EDITS:  # which comes as 429 and as 400
            wait = reply.retry_after_s or _seconds(answer.headers.get("Retry-After")) or FIRST_BACKOFF_S
            self._not_before = max(self._not_before, self._clock() + wait)
            return Later(wait, "Discord says 429")
        if answer.status_code in (401, 403, 404) and reply.code != UNKNOWN_MESSAGE:
            return self._give_up(answer.status_code, reply)
        if 400 <= answer.status_code < 500:
            self._failures = 0
            level = logging.INFO if reply.code in (UNKNOWN_MESSAGE, TOO_MANY_EDITS) else logging.ERROR
            log.log(level, "webhook %s: %s refused: %d%s", self._id, method, answer.status_code, reply.detail)
            return WebhookRejected(answer.status_code, reply.code)
        return self._back_off(f"Discord says {answer.status_code}{reply.detail}")

    def _read(self, answer: requests.Response) -> DiscordReply:
        """The reply in the body; a proxy's page has none."""
        try:
            body = answer.json()
        except ValueError:
            body = None
        if not isinstance(body, dict) or not body:
            return DiscordReply()
        return DiscordReply(
            id=str(body.get("id") or ""),
            code=body["code"] if isinstance(body.get("code"), int) else None,
            retry_after_s=_seconds(body.get("retry_after")),
            detail=self._masked(f" ({body.get('code')}: {body.get('message')})"[:300]),
        )

    def _give_up(self, status: int, reply: DiscordReply) -> Disabled:
        """Stop calling. Also after restarts, if Discord itself says that it is gone: a proxy's 403 may pass."""
        self.gone = Disabled(f"Discord says {status}{reply.detail}")
        log.error("webhook %s: %s; nothing more is sent to it. Make a new webhook, set DISCORD_WEBHOOK and restart "
                  "publish", self._id, self.gone.why)  # fmt: skip
        if self._gone_file is not None and reply.code in (UNKNOWN_WEBHOOK, INVALID_TOKEN):
            self._gone_file.remember(self._url, self.gone.why)
        return self.gone

    def _apply_rate_limit(self, answer: requests.Response) -> None:
        if answer.headers.get("X-RateLimit-Remaining") == "0":
            reset = _seconds(answer.headers.get("X-RateLimit-Reset-After")) or 0.0
            self._not_before = max(self._not_before, self._clock() + reset)

    def _back_off(self, why: str) -> Later:
        wait = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._not_before = max(self._not_before, self._clock() + wait)
        log.warning("webhook %s: %s; again in %.0f s", self._id, why, wait)
        return Later(wait, why)

    def _masked(self, text: str) -> str:
        return text.replace(self._token, "…")

    def _mask_record(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if self._token in text:
            record.msg, record.args = self._masked(text), ()
        return True


def check_url(url: str) -> tuple[str, str, str]:
    """The URL without trailing slash, the webhook's id, its token. Raises UserError, which does not say the token."""
    match = _DISCORD.fullmatch(url) or _LOOPBACK.fullmatch(url)
    if match is None:
        host = re.match(r"[a-z]+://(?:[^/@]*@)?([^/?#:@]{1,80})", url)
        why = f"its host is {host[1]}" if host else "it is no URL"
        raise UserError(
            f"DISCORD_WEBHOOK is not the URL of a Discord webhook ({why})",
            param="DISCORD_WEBHOOK",
            hint="it looks like https://discord.com/api/webhooks/<id>/<token>: "
            "channel settings, Integrations, Webhooks, Copy Webhook URL",
        )
    return url.rstrip("/"), match[1], match[2]


def _seconds(value: Any) -> float | None:
    try:
        return min(3600.0, max(0.0, float(value)))
    except (TypeError, ValueError):
        return None
