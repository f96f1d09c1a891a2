"""What a job leaves in a Discord channel: docs/pictures/discord.png, drawn by chromium from what the fake received.

python -m tests.sinks.pictures     # draw it anew, after a change of the messages
"""

from __future__ import annotations

import base64
import html
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.events import AttemptEnded
from jobs.reasons import Reason
from jobs.trainer_facts import OomRecovered, Sample
from tests.sinks import story
from tests.support.fakes import FakeDiscord, Message
from tests.support.machine import Clock
from worker.feed import SinkFeed
from worker.sinks.discord.limits import DiscordOptions
from worker.sinks.discord.sink import DiscordSink
from worker.sinks.discord.webhook import SUPPRESS_NOTIFICATIONS, Webhook

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "discord.png"
SIZE = (1180, 1060)
SAMPLES = [
    Sample(
        input="Title: Plain rice. Ingredients: 1 cup rice, 2 cups water",
        target="Rinse the rice. Boil it in the water for 12 minutes.",
        generated="Rinse 1 cup of rice. Boil it in 2 cups of water for 12 minutes.",
    ),
    Sample(
        input="Title: Tomato salad. Ingredients: 3 tomatoes, 1 onion, oil",
        target="Slice tomatoes and onion. Dress them with the oil.",
        generated="Cut the tomatoes and the onion into slices. Add the oil.",
    ),
    Sample(
        input="Title: Fried egg. Ingredients: 1 egg, butter",
        target="Melt the butter. Fry the egg for 3 minutes.",
        generated="Melt the butter in a pan. Fry the egg until it is done.",
    ),
]
SECONDS = 1483.0
"""Of training: 400 steps of 3.35 s, evaluations and the out-of-memory error."""
STYLE = """
body { margin: 0; padding: 16px; background: #313338; color: #dbdee1; font: 14px/1.4 "DejaVu Sans", sans-serif;
  columns: 3; column-gap: 16px; }
section { break-inside: avoid; margin-bottom: 18px; }
h2 { font-size: 13px; color: #949ba4; font-weight: normal; margin: 0 0 6px; }
article { background: #2b2d31; border-left: 4px solid; border-radius: 4px; padding: 10px 12px; margin-bottom: 4px; }
h3 { font-size: 15px; margin: 0 0 6px; color: #00a8fc; } p { margin: 0 0 8px; white-space: pre-line; }
dl { display: grid; grid-template-columns: 1fr 1fr 1fr; gap: 6px 8px; margin: 0 0 8px; font-size: 13px; }
dl div { grid-column: 1 / -1; } dl div.inline { grid-column: auto; }
dt { font-weight: bold; } dd { margin: 0; overflow-wrap: anywhere; } img { width: 100%; border-radius: 4px; }
code { background: #1e1f22; border-radius: 3px; padding: 1px 3px; } footer { font-size: 11px; color: #949ba4; }
a { color: #00a8fc; text-decoration: none; }
"""


def stages(folder: Path) -> list[tuple[str, Message]]:
    """The messages of a job with one out-of-memory error, each with what happened to it."""
    clock = Clock(1_000_000.0)
    run = story.submit(folder, name="flan-t5-xl-recipes")
    (run.path / "wandb").mkdir()
    (run.path / "wandb/url.txt").write_text("https://wandb.ai/us/longhaul/runs/job-1\n")
    with FakeDiscord() as discord:
        options = DiscordOptions.of(None, None, "https://box.example.org")
        sink = DiscordSink(Webhook(discord.url, clock, timeout_s=(5.0, 2.0)), clock, options=options)
        feed = SinkFeed(sink, run, clock)
        story.start(run, time="about 22 min on an RTX 5090")
        for step, loss in ((50, 1.54), (100, 1.24), (150, 1.11), (200, 1.05)):
            run.append([story.evaluation(step, loss)])
        run.append([story.evaluation(250, 1.02).model_copy(update={"samples": SAMPLES[:1]})])
        feed.turn()
        clock.now += 20
        story.train(run, 10, 270)
        feed.turn()
        clock.now += 20
        text = "CUDA out of memory. Tried to allocate 1.20 GiB."
        run.append([OomRecovered(step=271, micro_batch_before=8, micro_batch_after=4, message=text,
                                 milliseconds_lost=812.5)])  # fmt: skip
        feed.turn()
        planned, training, memory = discord.messages
        during = replace(training, versions=[*training.versions], attachments={**training.attachments})
        story.train(run, 280, story.STEPS)
        run.append([story.evaluation(step, loss) for step, loss in ((300, 0.97), (350, 0.93))])
        run.append(
            [
                story.evaluation(story.STEPS, 0.91).model_copy(update={"samples": SAMPLES}),
                AttemptEnded(reason=Reason.DONE, step=story.STEPS, exit_code=0),
                story.SUCCEEDED.model_copy(update={"seconds": SECONDS}),
            ]
        )
        clock.now += 20
        feed.turn()
        done = discord.messages[-1]
    return [
        ("Prepared", planned),
        ("In training: one message, edited every 15 s", during),
        ("The first out-of-memory error", memory),
        ("The same message at the end", training),
        ("Done", done),
    ]


def page(shown: list[tuple[str, Message]]) -> str:
    """They as Discord shows them, more or less."""
    sections = []
    for caption, message in shown:
        silent = message.versions[0].get("flags", 0) & SUPPRESS_NOTIFICATIONS
        how = "silent" if silent else "the phone rings"
        articles = "".join(_embed(embed, message) for embed in message.versions[-1]["embeds"])
        in_embed = any("image" in embed for embed in message.versions[-1]["embeds"])
        pictures = "" if in_embed else "".join(map(_image, message.attachments.values()))
        sections.append(f"<section><h2>{caption} · {how}</h2>{articles}{pictures}</section>")
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>" + "".join(sections)


def _embed(embed: dict[str, Any], message: Message) -> str:
    fields = "".join(
        f"<div{' class=inline' if field.get('inline') else ''}><dt>{_text(field['name'])}</dt>"
        f"<dd>{_text(field['value'])}</dd></div>"
        for field in embed.get("fields", [])
    )
    picture = "".join(map(_image, message.attachments.values())) if "image" in embed else ""
    at = " · today at 03:12" if "timestamp" in embed else ""
    footer = f"<footer>{_text(embed['footer']['text'])}{at}</footer>" if "footer" in embed else ""
    return (
        f"<article style='border-color: #{embed['color']:06x}'><h3>{_text(embed['title'])}</h3>"
        f"<p>{_text(embed.get('description', ''))}</p><dl>{fields}</dl>{picture}{footer}</article>"
    )


def _image(content: bytes) -> str:
    return f"<img src='data:image/png;base64,{base64.b64encode(content).decode()}'>"


def _text(markdown: str) -> str:
    text = html.escape(markdown)
    text = re.sub(r"```(?:\n)?(.*?)```|`(.*?)`", lambda m: f"<code>{m[1] or m[2]}</code>", text, flags=re.DOTALL)
    text = re.sub(r"\*\*(.*?)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\[(.*?)\]\((https?://[^)]*)\)", r"<a href='\2'>\1</a>", text)


def main() -> None:
    """Draw it."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "page.html")
        file.write_text(page(stages(Path(name, "runs"))), encoding="utf-8")
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --hide-scrollbars --window-size={SIZE[0]},{SIZE[1]}"
        command = ["chromium", *flags.split(), f"--user-data-dir={name}/chromium", f"--screenshot={PICTURE}", str(file)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
