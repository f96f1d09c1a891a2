"""Discord's limits on a message, kept by cutting texts with an ellipsis.

Source: Discord's API documentation (embed limits) and ../shared/specs/discord_webhook.schema.json. Lengths are counted
in UTF-16 code units, never fewer than characters, so that the limits hold however the other side counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypedDict, cast

from jobs.process.public_url import public_url
from jobs.text.units import printable


class EmbedField(TypedDict):
    """A name and a value; `inline`: beside others."""

    name: str
    value: str
    inline: bool


class EmbedFooter(TypedDict):
    """Small text below."""

    text: str


class EmbedImage(TypedDict):
    """A picture below the fields."""

    url: str


class Embed(TypedDict, total=False):
    """A part of a message, as Discord takes it."""

    title: str
    url: str
    description: str
    color: int
    fields: list[EmbedField]
    image: EmbedImage
    footer: EmbedFooter
    timestamp: str


class Payload(TypedDict):
    """A message."""

    embeds: list[Embed]


EMBEDS = 10
TITLE = 256
DESCRIPTION = 4096
FIELDS = 25
FIELD_NAME = 256
FIELD_VALUE = 1024
FOOTER = 2048
SUM_OVER_ALL_EMBEDS = 6000
FILE_BYTES = 8 * 2**20
"""Attachments larger than this are left out (the lowest limit of any server)."""

ELLIPSIS = "…"
NOTHING = "–"
SHORTEST_VALUE = 16
"""With less room than this a field is left out."""


def size(text: str) -> int:
    """Length in UTF-16 code units."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def cut(text: str, limit: int) -> str:
    """At most `limit` long, an ellipsis in place of what is missing; an open code block stays closed."""
    text = printable(text)
    if size(text) <= limit:
        return text
    fence = "\n```" if text.startswith("```") and text.endswith("```") and limit > 12 else ""
    room = limit - len(ELLIPSIS) - len(fence)
    if room < 0:
        return ""
    kept = text.encode("utf-16-le")[: 2 * room].decode("utf-16-le", "ignore")  # never half a surrogate pair
    return kept.rstrip() + ELLIPSIS + fence


def fit(embeds: list[Embed]) -> list[Embed]:
    """The embeds within all limits. Later texts give way first: what matters most is written first."""
    left = SUM_OVER_ALL_EMBEDS
    fitted: list[Embed] = []
    for embed in embeds[:EMBEDS]:
        # Title and footer say what a message is about, and are short: they are paid for before anything else.
        title = cut(embed.get("title", ""), TITLE)
        footer = cut(embed["footer"]["text"], FOOTER) if "footer" in embed else ""
        left -= size(title) + size(footer)
        if left < 0:
            break
        description = cut(embed.get("description", ""), min(DESCRIPTION, left))
        left -= size(description)
        fields: list[EmbedField] = []
        for field in embed.get("fields", [])[:FIELDS]:
            name = cut(_visible(field["name"]), FIELD_NAME)
            room = min(FIELD_VALUE, left - size(name))
            if room < SHORTEST_VALUE:
                break
            value = cut(_visible(field["value"]), room)
            left -= size(name) + size(value)
            fields.append({"name": name, "value": value, "inline": field["inline"]})
        texts = {"title": title, "description": description, "fields": fields, "footer": footer and {"text": footer}}
        whole = {**embed, **texts}
        fitted.append(cast("Embed", {key: value for key, value in whole.items() if value or key not in texts}))
    return fitted


def _visible(text: str) -> str:
    """Discord refuses a field whose name or value is blank."""
    return text if printable(text).strip() else NOTHING


# -- options -----------------------------------------------------------------------------------------------------------
# What the operator wants of the messages: which, whom they call, where they lead.

KINDS = ("progress", "plan", "warnings", "done", "failed", "paused", "cancelled")
"""Of messages. Warnings: out of memory, low disk, no GPU, an attempt that is repeated, a repair, damage."""
_MENTION = re.compile(r"<@(&?)(\d{1,20})>")


@dataclass(frozen=True)
class DiscordOptions:
    """Everything, nobody in particular, and no link, unless said."""

    kinds: frozenset[str] = frozenset(KINDS)
    mention: str | None = None
    """`<@ID>`, a user, or `<@&ID>`, a role: called by messages that need a person."""
    public_url: str | None = None
    """Where people reach the service."""

    @classmethod
    def of(cls, events: str | None, mention: str | None, url: str | None) -> DiscordOptions:
        """From the texts of the environment. ValueError names the variable."""
        kinds = frozenset(word for word in re.split(r"[,\s]+", events or "") if word) or frozenset(KINDS)
        if unknown := sorted(kinds - {*KINDS}):
            raise ValueError(f"LONGHAUL_DISCORD_EVENTS names {unknown[0]!r}; it is a list of: {', '.join(KINDS)}")
        if mention and not _MENTION.fullmatch(mention):
            raise ValueError(f"LONGHAUL_DISCORD_MENTION is {mention!r}; it is <@ID> of a user or <@&ID> of a role")
        return cls(kinds, mention or None, public_url(url))

    def link(self, job: str) -> str | None:
        """To the job."""
        return f"{self.public_url}/jobs/{job}" if self.public_url else None

    def sweep_link(self, sweep: str) -> str | None:
        """To the sweep."""
        return f"{self.public_url}/sweeps/{sweep}" if self.public_url else None

    def call(self) -> dict[str, object]:
        """The parts of a message that call the person, and nobody else."""
        if self.mention is None:
            return {}
        found = _MENTION.fullmatch(self.mention)
        assert found is not None, "checked when it was read"
        who = "roles" if found[1] else "users"
        return {"content": self.mention, "allowed_mentions": {"parse": [], who: [found[2]]}}
