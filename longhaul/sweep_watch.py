"""`longhaul sweep watch`: the trials of a sweep as they end. It can be left and entered again; the sweep continues."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from longhaul.answers import SweepDict, TrialDict
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.columns import print_facts
from longhaul.connection import RetryPolicy
from longhaul.figures import clock, duration, loss
from longhaul.sweep_tables import cause, counted, settings_text, short_names, status_text

POLL_S = 1.5
Standing = tuple[SweepDict, Sequence[TrialDict]]
"""A sweep, and those of its trials that have ended or paused since the last time, in the order in which they did."""


def follow_sweep(api: Longhaul, sweep: str, console: Console) -> Iterator[Standing]:
    """How it stands, again and again until it has ended, across outages.

    Raises ApiError (no such sweep), Unreachable (nobody there to begin with), KeyboardInterrupt (the user left).
    """
    told: dict[int, str] = {}
    policy = RetryPolicy(lambda trouble: console.print(trouble, style="yellow", highlight=False, soft_wrap=True))
    stands, trials = api.sweep(sweep), api.sweep_trials(sweep)
    while True:
        news = [each for each in trials if each["status"] not in ("running", told.get(each["number"]))]
        yield stands, sorted(news, key=lambda trial: (trial["finished_at"] or math.inf, trial["number"]))
        if stands["status"] != "running":
            return
        told = {trial["number"]: trial["status"] for trial in trials}
        time.sleep(POLL_S)
        while True:
            try:
                stands = api.sweep(sweep)
                trials = api.sweep_trials(sweep)  # after it: an ended sweep has no trial to come
                policy.well()
                break
            except (ApiError, Unreachable) as error:
                policy.trouble(error)
                policy.pause()


def watch_sweep(api: Longhaul, sweep: str, console: Console) -> SweepDict:
    """Show each trial that ends or pauses, and the best one so far, until the sweep ends; returns it."""
    standing = follow_sweep(api, sweep, console)
    shown, news = next(standing)
    names = short_names(shown["parameters"])
    console.print(Text(f"{shown['name']} · {sweep}", style="bold"), soft_wrap=True)
    _print_news(shown, news, names, console)
    if not console.is_terminal:
        for shown, news in standing:
            _print_news(shown, news, names, console)
        return shown
    with Live(_line(shown, console), console=console, refresh_per_second=4, transient=True) as live:
        for shown, news in standing:
            _print_news(shown, news, names, console)
            live.update(_line(shown, console))
    return shown


def _print_news(sweep: SweepDict, trials: Sequence[TrialDict], names: Mapping[str, str], console: Console) -> None:
    """A line each, the last with the best so far."""
    for trial in trials:
        value = "" if trial["value"] is None else f", {sweep['metric']} {loss(trial['value'])}"
        why = f" ({words})" if (words := cause(trial)) else ""
        settings = settings_text(trial["settings"], names)
        took = f", {duration(trial['seconds'])}" if trial["finished_at"] else ""
        told = f"{value}{took}: {settings}{why}"
        best = f" · {_best(sweep)}" if trial is trials[-1] and sweep["best"] else ""
        line = Text.assemble(f"trial {trial['number']} ", status_text(trial), told, best)
        at = clock(trial["finished_at"] or time.time())
        if console.is_terminal:
            print_facts([(at, line)], console)
        else:
            console.print(Text.assemble(f"{at}  ", line), soft_wrap=True)


def _best(sweep: SweepDict) -> str:
    best = sweep["best"]
    return f"best: trial {best['number']}, {loss(best['value'])}" if best else "no trial has succeeded yet"


def _line(sweep: SweepDict, console: Console) -> Text:
    """Where it stands, in one line of the terminal."""
    line = Text(f"{sweep['status']} · {counted(sweep)} · {_best(sweep)}")
    line.truncate(console.width, overflow="ellipsis")
    return line
