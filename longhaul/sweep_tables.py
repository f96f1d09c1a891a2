"""Sweeps and their trials as tables, once and as they proceed."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jobs.answers import JsonObject, Sweep, Trial
from jobs.text.units import format_share, one_line
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.connection import RetryPolicy
from longhaul.figures import clock, duration, loss
from longhaul.tables import Column, Row, print_facts, print_table, short_ids

STYLES = {
    "succeeded": "green",
    "failed": "red",
    "running": "cyan",
    "paused": "yellow",
    "pruned": "yellow",
    "cancelled": "dim",
}
_ORDER = ("succeeded", "pruned", "running", "paused", "failed", "cancelled")
_REASONS = {"max_hours": "the time limit was reached", "failures": "too many trials in a row failed alike"}
_SWEEPS = (
    Column("name", folds=16),
    Column("id", short=short_ids),
    Column("status", folds=9),
    Column("trials", right=True, goes=3),
    Column("best", right=True, goes=2),
    Column("submitted", right=True, goes=1),
)


def print_sweeps(sweeps: Sequence[Sweep], console: Console) -> None:
    """One line a sweep."""
    if not sweeps:
        console.print("no sweeps yet: longhaul sweep FILE")
        return
    rows: list[Row] = [
        {
            "name": Text(each["name"]),
            "id": each["id"],
            "status": Text(each["status"], style=STYLES[each["status"]]),
            "trials": f"{sum(each['trials'].values()):,}/{each['max_trials']:,}",
            "best": f"{each['metric']} {loss(each['best']['value'])}" if each["best"] else "–",
            "submitted": clock(each["created_at"]),
        }
        for each in sweeps
    ]
    print_table(_SWEEPS, rows, console)


def print_sweep(sweep: Sweep, trials: Sequence[Trial], console: Console) -> None:
    """What it is and what came of it; then its trials, the best first."""
    names = short_names(sweep["parameters"])
    status = f" ({words})" if (words := _REASONS.get(sweep["reason"] or "")) else ""
    if sweep["status"] == "running" and sweep["cancel_requested"]:
        status = " (cancel requested)"
    lines: list[tuple[str, str | Text]] = [
        ("sweep", Text(f"{sweep['name']} · {sweep['id']}", style="bold")),
        ("status", Text.assemble((sweep["status"], STYLES[sweep["status"]]), status)),
    ]
    if waiting := sweep.get("waiting"):
        lines.append(("waiting", Text(f"no trial starts now: {waiting}", style="yellow")))
    if sweep["error"]:
        lines.append(("cause", Text(f"{sweep['error']['message']} [{sweep['error']['code']}]", style="red")))
        if hint := sweep["error"]["hint"]:
            lines.append(("hint", Text(hint)))
    pruning = "" if sweep["pruning"] == "none" else f", pruning {sweep['pruning']}"
    lines.append(("tries", Text(f"{', '.join(sweep['parameters'])} ({sweep['sampler']}{pruning})")))
    lines.append(("by", f"{sweep['metric']}, {'less' if sweep['direction'] == 'minimize' else 'more'} is better"))
    lines.append(("trials", counted(sweep)))
    if best := sweep["best"]:
        figures = f"trial {best['number']}: {sweep['metric']} {_value(best)}, {settings_text(best['settings'], names)}"
        jobs = (f"{job} (its model is gone)" if job in best["gone"] else job for job in best["jobs"])
        lines += [("best", Text(figures)), ("its jobs" if len(best["jobs"]) > 1 else "its job", " ".join(jobs))]
    if sweep["importances"]:
        shares = (f"{names.get(key, key)} {format_share(share)}" for key, share in sweep["importances"].items())
        so_far = " (provisional)" if sweep["status"] == "running" else ""
        lines.append(("differences", Text(f"explained by {', '.join(shares)}{so_far}")))
    lines += [("" if number else "note", Text(each)) for number, each in enumerate(sweep["warnings"])]
    print_facts(lines, console)
    if trials:
        console.print()
        _print_trials(sweep, trials, names, console)


def _print_trials(sweep: Sweep, trials: Sequence[Trial], names: Mapping[str, str], console: Console) -> None:
    columns = [
        Column("trial", right=True),
        Column(sweep["metric"], right=True),
        Column("settings", folds=20),
        Column("time", right=True, goes=3),
        Column("status", folds=10),
        Column("cause", folds=20, goes=2),
        Column("jobs", folds=24, goes=1),
    ]
    if not any(map(cause, trials)):
        columns = [each for each in columns if each.title != "cause"]
    rows: list[Row] = [
        {
            "trial": f"{each['number']}",
            sweep["metric"]: loss(each["value"]),
            "settings": Text(settings_text(each["settings"], names)),
            "time": duration(each["seconds"]) if each["finished_at"] else "–",
            "status": status_text(each),
            "cause": Text(cause(each)),
            "jobs": " ".join(each["jobs"]) or "–",
        }
        for each in best_first(sweep, trials)
    ]
    print_table(columns, rows, console)


def best_first(sweep: Sweep, trials: Sequence[Trial]) -> list[Trial]:
    """Those that succeeded by their values, then the pruned, those that are open, and those without a result."""
    sign = 1 if sweep["direction"] == "minimize" else -1

    def place(trial: Trial) -> tuple[int, float, int]:
        return _ORDER.index(trial["status"]), sign * (trial["value"] or 0.0), trial["number"]

    return sorted(trials, key=place)


def counted(sweep: Sweep) -> str:
    """How many there are of how many, by status."""
    found = Counter(sweep["trials"])
    by_status = ", ".join(f"{found[status]:,} {status}" for status in _ORDER if found[status])
    return f"{found.total():,} of {sweep['max_trials']:,}" + (f": {by_status}" if by_status else "")


def status_text(trial: Trial) -> Text:
    """Its status, with the code of its error."""
    code = f": {trial['error']['code']}" if trial["error"] else ""
    return Text.assemble((trial["status"], STYLES[trial["status"]]), code)


def cause(trial: Trial) -> str:
    """Why it failed, was pruned or is paused; or nothing."""
    return one_line(trial["error"]["message"] if trial["error"] else trial["message"] or "")


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, where no other key ends in the same."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    return {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}


def settings_text(settings: JsonObject, names: Mapping[str, str]) -> str:
    """All of them in a line."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return ", ".join(f"{names.get(key, key)} {value}" for key, value in values.items())


def _value(trial: Trial) -> str:
    """Of several seeds, all beside their mean."""
    values = trial["values"]
    seeds = f" (mean of {', '.join(map(loss, values))})" if len(values) > 1 else ""
    return f"{loss(trial['value'])}{seeds}"


# -- sweep watch -------------------------------------------------------------------------------------------------------
# `longhaul sweep watch`: the trials of a sweep as they end. It can be left and entered again; the sweep continues.

POLL_S = 1.5
Standing = tuple[Sweep, Sequence[Trial]]
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


def watch_sweep(api: Longhaul, sweep: str, console: Console) -> Sweep:
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


def _print_news(sweep: Sweep, trials: Sequence[Trial], names: Mapping[str, str], console: Console) -> None:
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


def _best(sweep: Sweep) -> str:
    best = sweep["best"]
    return f"best: trial {best['number']}, {loss(best['value'])}" if best else "no trial has succeeded yet"


def _line(sweep: Sweep, console: Console) -> Text:
    """Where it stands, in one line of the terminal."""
    line = Text(f"{sweep['status']} · {counted(sweep)} · {_best(sweep)}")
    line.truncate(console.width, overflow="ellipsis")
    return line
