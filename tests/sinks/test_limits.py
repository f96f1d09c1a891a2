"""Discord's limits are kept whatever is to be said."""

from __future__ import annotations

import pytest

from tests.support.fakes import discord_problems
from worker.sinks.discord.limits import Embed, cut, fit, size


@pytest.mark.parametrize("text", ["a" * 50, "ß" * 50, "😀" * 50, "a😀" * 25, "\ud800" * 50, " " * 50])
@pytest.mark.parametrize("limit", [0, 1, 2, 11, 12, 49])
def test_cut_keeps_the_limit_in_utf16(text: str, limit: int) -> None:
    shorter = cut(text, limit)
    assert size(shorter) <= limit
    assert limit == 0 or shorter.endswith("…")
    shorter.encode()  # no half characters


def test_no_text_reorders_a_line_or_commands_a_terminal() -> None:
    (fitted,) = fit(
        [{"title": "\x1b[2Ja\u202eb", "fields": [{"name": "\x9b\u2066", "value": "\x7f\n", "inline": True}]}]
    )
    assert fitted == {"title": "[2Jab", "fields": [{"name": "–", "value": "–", "inline": True}]}


def test_cut_leaves_short_texts_alone_and_closes_code_blocks() -> None:
    assert cut("short", 5) == "short"
    assert cut("```\n" + "x" * 100 + "\n```", 40).endswith("x…\n```")


@pytest.mark.parametrize("text", ["x", "😀", "", " \n", "`*_"])
@pytest.mark.parametrize("count", [0, 1, 30, 5000])
def test_fit(text: str, count: int) -> None:
    long = text * count
    embeds: list[Embed] = [
        {
            "title": long,
            "description": long,
            "color": 1,
            "fields": [{"name": long, "value": long, "inline": True}] * 40,
            "footer": {"text": long},
        }
    ] * 12
    fitted = fit(embeds)
    assert not discord_problems(
        {"embeds": fitted or [{"title": "-"}], "allowed_mentions": {"parse": []}}, {}, edit=True
    )


def test_what_matters_most_survives() -> None:
    long = "x" * 3000
    embed: Embed = {
        "title": "t",
        "description": long,
        "fields": [{"name": "n", "value": long, "inline": True}] * 9,
        "footer": {"text": "job · 7"},
    }
    (first, *_) = fit([embed, embed])
    assert first["footer"] == {"text": "job · 7"}
    assert first["description"] == long
    assert len(first["fields"]) >= 2
