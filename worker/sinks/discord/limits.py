"""Discord's limits on a message, kept by cutting texts with an ellipsis.

Source: Discord's API documentation (embed limits) and ../shared/specs/discord_webhook.schema.json. Lengths are counted
in UTF-16 code units, never fewer than characters, so that the limits hold however the other side counts.
"""

from __future__ import annotations

from typing import TypedDict, cast

from jobs.text.printable import printable


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
