"""`longhaul watch`: a job as it goes. It can be left and entered again; the job does not notice."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.answers import Job, ShownEvent
from jobs.attempt import activity_text
from jobs.plan import limit_words
from jobs.text.units import format_number, format_share, one_line
from jobs.trainer_facts import Sample
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.figures import clock, duration, loss, size, time_needed
from longhaul.tables import GAP, print_facts

POLL_S = 1.0
PLAIN_EVERY_S = 30.0
HISTORY = 10
"""Events shown of the time before one came in."""
STALE_S = 120.0
SHORTEST_BAR, LONGEST_BAR = 6, 30
SEPARATOR = " · "
_STYLES = {"warn": "yellow", "error": "bold red"}


def watch(
    api: Longhaul, job: str, *, console: Console, history: int = HISTORY, tick: Callable[[], None] = lambda: None
) -> Job:
    """Show events and progress until the job ends; returns it. `tick` is called about once a second.

    Raises ApiError (no such job), Unreachable (nobody there to begin with), KeyboardInterrupt (the user left).
    """
    shown = api.get(job)
    after = max(0, shown["event_number"] - history)
    console.print(Text(f"{shown['name']} · {job} · {shown['model']}", style="bold"))
    if after:
        console.print(
            f"… {after} earlier {'event' if after == 1 else 'events'}: longhaul show {job} --events",
            style="dim",
            highlight=False,
        )
    follower = _EventPrinter(api.another(), job, after)
    states = _states(api, job, follower, console, tick)
    if console.is_terminal:
        with Live(status_line(shown, console), console=console, refresh_per_second=4, transient=True) as live:
            for shown in states:
                live.update(status_line(shown, console))
        return shown
    told_at, told_step = time.monotonic(), 0
    for shown in states:
        step = shown["progress"]["step"]
        if (step > told_step or _doing(shown)) and time.monotonic() - told_at >= PLAIN_EVERY_S:
            console.print(_line(shown), highlight=False, soft_wrap=True)
            told_at, told_step = time.monotonic(), step
    return shown


def _states(
    api: Longhaul, job: str, follower: _EventPrinter, console: Console, tick: Callable[[], None]
) -> Iterator[Job]:
    """The job about once a second, after its new events were printed; last, as it ended."""
    ended = False
    while True:
        ended = _print_new(follower, console) or ended
        tick()
        try:
            shown = api.get(job)
        except Unreachable:  # the follower says so, and tries again
            continue
        except ApiError as error:
            if error.status < 500 and error.status != 429:
                raise
            continue
        yield shown
        if ended:
            return


def _print_new(follower: _EventPrinter, console: Console) -> bool:
    """Print for about a second what comes; whether it was the last event."""
    deadline = time.monotonic() + POLL_S
    while (left := deadline - time.monotonic()) > 0:
        match follower.next(left):
            case None:
                pass
            case str() as trouble:
                console.print(trouble, style="yellow", highlight=False)
            case ApiError() | Unreachable() as error:
                raise error
            case _End():
                return True
            case event:
                print_event(event, console)
    return False


class _End:
    """No more events."""


class _EventPrinter:
    """Reads the event stream in a thread of its own, because a quiet stream blocks."""

    def __init__(self, api: Longhaul, job: str, after: int) -> None:
        self._items: queue.Queue[ShownEvent | str | ApiError | Unreachable | _End] = queue.Queue()
        self._api, self._job, self._after = api, job, after
        threading.Thread(target=self._run, name="follow", daemon=True).start()

    def next(self, timeout_s: float) -> ShownEvent | str | ApiError | Unreachable | _End | None:
        """The next event, a line about trouble, a refusal, END; None: nothing in time."""
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _run(self) -> None:
        try:
            with self._api as api:
                for event in api.events(self._job, after=self._after, on_trouble=self._items.put):
                    self._items.put(event)
            self._items.put(_End())
        except (ApiError, Unreachable) as error:
            self._items.put(error)


def print_event(event: ShownEvent, console: Console) -> None:
    """When, and what; an evaluation with its first sample. A line each where it is no terminal."""
    message = Text(one_line(event["message"]), style=_STYLES.get(event["level"], ""))
    if console.is_terminal:
        print_facts([(clock(event["at"]), message)], console)
    else:
        console.print(Text.assemble(f"{clock(event['at'])}  ", message), soft_wrap=True)
    for sample in map(Sample.model_validate, event["data"].get("samples", [])[:1]):
        for side, said in (("input", sample.input), ("target", sample.target), ("generated", sample.answer)):
            text = Text(f"{'':10}{side:11}{one_line(said)}", style="dim")
            console.print(text, no_wrap=True, overflow="ellipsis")


def status_line(job: Job, console: Console) -> Table:
    """State, bar, step, loss, time left, speed and memory, as many of them as one line has room for."""
    row: list[Text | ProgressBar] = [Text(_state(job), style="bold")]
    if job["steps"]:
        figures = _figures(job)
        room = console.width - cell_len(_state(job)) - GAP
        while len(figures) > 1 and room < cell_len(SEPARATOR.join(figures)) + GAP + SHORTEST_BAR:
            figures.pop()
        bar = min(LONGEST_BAR, room - cell_len(SEPARATOR.join(figures)) - GAP)
        if bar >= SHORTEST_BAR:
            row.append(ProgressBar(total=job["steps"], completed=job["progress"]["step"], width=bar))
        row.append(Text(SEPARATOR.join(figures)))
    grid = Table.grid(padding=(0, GAP))
    grid.add_row(*row)
    return grid


def _line(job: Job) -> str:
    return f"{clock(time.time())}  {_state(job)}: {SEPARATOR.join(_figures(job))}"


def _state(job: Job) -> str:
    status = job["status"]
    if job["requested"] != "none":
        return "pausing" if job["requested"] == "pause" else "cancelling"
    if status == "paused" and job["error"]:
        return f"paused: {job['error']['code']}"
    if job["queue_position"]:
        return f"{status}, number {job['queue_position']} in the queue"
    if doing := _doing(job):
        return doing if status == "validating" else f"{status}: {doing}"
    if status == "validating":
        return "checking" if job["stage"] == "check" else "preparing the data"
    if status == "queued" and job["not_before"] and (wait := job["not_before"] - time.time()) > 0:
        return f"next attempt in {duration(wait)}"
    return status


def _doing(job: Job) -> str | None:
    """What its process does besides training."""
    activity = job.get("activity")  # an older service says nothing of it
    if not activity or activity["phase"] == "step":
        return None
    return activity_text(activity["words"], activity["since"], activity["fraction"])


def _figures(job: Job) -> list[str]:
    """What is known of its progress, what matters most first."""
    progress = job["progress"]
    if not progress["at"]:
        step = f"step {progress['step']:,}/{job['steps']:,}" if job["steps"] else "no figures yet"
        return [step, needed] if (needed := time_needed(job)) else [step]
    parts = [f"step {progress['step']:,}" + (f"/{job['steps']:,}" if job["steps"] else "")]
    if job["status"] == "running":
        age = time.time() - progress["at"]
        if age > STALE_S:  # an estimate that nothing confirms any more would be a lie
            parts.append(f"last figures {duration(age)} ago")
        elif progress["eta_s"] is not None:
            parts.append(f"{duration(progress['eta_s'] - age)} left")
    rate, tokens, share = progress["rows_per_s"], progress["tokens_per_s"], progress["mfu"]
    parts += [
        f"training loss {loss(progress['loss'])}",
        *([f"{format_number(rate, 3)} rows/s"] if rate is not None else []),
        size(progress["memory_bytes"]),
        *([f"MFU {format_share(share)}"] if share is not None else []),
        *([f"{format_number(tokens)} tokens/s"] if tokens is not None else []),
        *([limit] if (limit := limit_words(job["limited_by"])) else []),
    ]
    return parts
