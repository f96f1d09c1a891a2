"""Sweeps: many trials of one job."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from jobs.answers import Job, JsonObject, Sweep
from jobs.errors import UserError
from jobs.state import CANCEL_FIRST
from jobs.sweeps.space import Parameter
from jobs.sweeps.spec import parse_sweep
from longhaul.api import ApiError, Longhaul, Unreachable
from longhaul.commands.command import ACTS, JOB_ENDED_BADLY, LEFT, OK, Call, Commands, Run, confirm, print_json
from longhaul.commands.submitting import NOT_SUBMITTED, check_first, rejected, unchecked
from longhaul.jobfile import ROWS, BadInput, apply_changes, object_in, split_change, value_of
from longhaul.plan import too_few
from longhaul.sweep_tables import follow_sweep, print_sweep, print_sweeps, watch_sweep


def add(commands: Commands) -> None:
    """sweep."""
    made = commands.add(
        "sweep", _submit, "try many settings of a job, or see what came of it", shown="FILE|show ID|…", json_too=False
    )
    made.implied = "submit"
    kinds = made.add_subparsers(required=True, metavar="FILE|submit|watch|show|list|cancel|repeat|delete")

    def kind(name: str, run: Run, tells: str, *, of: bool = True) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = kinds.add_parser(
            name, help=tells, description=tells[0].upper() + tells[1:] + "."
        )
        parser.set_defaults(run=run)
        parser.add_argument("--json", action="store_true", help="print JSON")
        if of:
            parser.add_argument("sweep", metavar="ID")
        return parser

    submit = kind("submit", _submit, "submit a sweep file (.json); `longhaul sweep FILE` is the same", of=False)
    submit.add_argument("file", metavar="FILE", help="a sweep file: a job, and the settings to try")
    submit.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"e.g. {EXAMPLE}, job.training.epochs=3"
    )
    unchecked(submit, "each trial is checked in its turn")
    submit.add_argument("--idempotency-key", metavar="KEY", help="the same key and sweep, sent twice, create one sweep")
    kind("watch", _watch, "show each trial that ends, to the end of the sweep; Ctrl-C leaves it running")
    show = kind("show", _show, "show a sweep: its best trial, then all of them, the best first")
    show.add_argument("--csv", action="store_true", help="print all trials as CSV")
    kind("list", _list, "list sweeps, newest first", of=False)
    cancel = kind("cancel", _cancel, "start no more trials and cancel those that are open")
    repeat = kind("repeat", _repeat, "train the best trial with other seeds: how much of it was luck")
    repeat.add_argument("--trial", type=int, metavar="N", help="another one than the best")
    repeat.add_argument("--seeds", type=int, default=5, metavar="K", help="so many seeds (default: 5)")
    for parser in (submit, repeat):
        parser.add_argument("--watch", action="store_true", help="follow the sweep to its end")
    delete = kind("delete", _delete, "delete an ended sweep and the jobs of its trials with all files; asks first")
    delete.add_argument("-y", "--yes", action="store_true", help="do not ask")
    for parser in (cancel, delete):
        parser.set_defaults(**ACTS)


def _submit(call: Call) -> int:
    given = call.given
    sweep = read_sweep(given.file, given.set)
    with call.connect() as api:
        try:
            job = _rejected_job(call, api, sweep)
        except KeyboardInterrupt:
            call.left(f"{NOT_SUBMITTED} (--no-check submits a sweep at once; its trials are checked in their turn)")
            return LEFT
        if job is not None:
            return rejected(call, job)
        return _made(call, api, lambda: api.submit_sweep(sweep, idempotency_key=given.idempotency_key))


def _rejected_job(call: Call, api: Longhaul, given: object) -> Job | None:
    """What *check* says of the job with the first value of each parameter, where it would say the same of every trial;
    None: nothing. What it says of this one alone is a note, as for one trial of many."""
    try:
        sweep = parse_sweep(given)
    except UserError:  # the service says it
        return None
    job = sweep.trial(sweep.first).model_dump(mode="json", by_alias=True)
    found = check_first(call, api, partial(api.submit, job))
    if found is None:
        return None
    if found.preview is not None:
        for few in too_few(found.plan, found.job) if found.plan else []:
            call.note(few)
        with suppress(ApiError):  # it is in no list in any case
            api.delete(found.job["id"])
    elif (error := found.job["error"]) is not None and sweep.may_mend(error["code"], error["param"]):
        call.note(f"the first values of all parameters are rejected, others are tried: {error['message']}")
    else:
        return found.job
    return None


def _repeat(call: Call) -> int:
    given = call.given
    with call.connect() as api:
        return _made(call, api, lambda: api.repeat_trial(given.sweep, trial=given.trial, seeds=given.seeds))


def _made(call: Call, api: Longhaul, make: Callable[[], Sweep]) -> int:
    try:
        sweep = make()
    except KeyboardInterrupt:  # the service may have it, and its answer is not here yet
        call.left("the sweep may have been submitted: longhaul sweep list shows it")
        return LEFT
    for warning in sweep["warnings"]:
        call.note(warning)
    if call.given.watch:
        return _watch_to_end(call, api, sweep["id"])

    def people() -> None:
        call.say(f"{sweep['id']} is {sweep['status']}: {sweep['max_trials']:,} trials at most")
        call.say(f"follow it with: longhaul sweep watch {sweep['id']}", "dim")

    return call.answer(sweep, people)


def _watch(call: Call) -> int:
    with call.connect() as api:
        return _watch_to_end(call, api, call.given.sweep)


def _watch_to_end(call: Call, api: Longhaul, sweep: str) -> int:
    """Follow it to its end. With --json: a line for each trial that ends, then the sweep."""
    try:
        if call.given.json:
            for _, news in follow_sweep(api, sweep, call.errors):
                for trial in news:
                    if trial["finished_at"]:
                        print_json(trial)
            shown = api.sweep(sweep)
            print_json(shown)
            return _ending(shown)
        shown = watch_sweep(api, sweep, call.console)
    except KeyboardInterrupt:
        call.left(f"{_left(api, sweep)}; watch it again with: longhaul sweep watch {sweep}")
        return LEFT
    print_sweep(shown, [], call.console)
    call.say(f"all trials: longhaul sweep show {sweep}", "dim")
    if best := shown["best"]:
        there = [job for job in best["jobs"] if job not in best["gone"]]
        if there:
            call.say(f"fetch the best model with: longhaul download {there[0]}", "dim")
        else:
            call.say(f"the model of the best trial is gone; train it again with: longhaul sweep repeat {sweep}", "dim")
    return _ending(shown)


def _left(api: Longhaul, sweep: str) -> str:
    """How a sweep stands that nobody watches any more."""
    try:
        status = api.sweep(sweep)["status"]
    except (ApiError, Unreachable):
        status = "running"
    return "the sweep continues without you" if status == "running" else f"the sweep has ended: {status}"


def _ending(sweep: Sweep) -> int:
    """Exit code."""
    return OK if sweep["status"] == "succeeded" else JOB_ENDED_BADLY


def _show(call: Call) -> int:
    with call.connect() as api:
        if call.given.csv:
            sys.stdout.write(api.sweep_csv(call.given.sweep))
            return OK
        sweep = api.sweep(call.given.sweep)
        trials = api.sweep_trials(sweep["id"])
    return call.answer({**sweep, "all_trials": trials}, lambda: print_sweep(sweep, trials, call.console))


def _list(call: Call) -> int:
    with call.connect() as api:
        found = list(api.sweeps())
    return call.answer(found, lambda: print_sweeps(found, call.console))


def _cancel(call: Call) -> int:
    with call.connect() as api:
        sweep = api.cancel_sweep(call.given.sweep)
    return call.answer(sweep, lambda: call.say(f"{sweep['id']} is {sweep['status']}, cancel requested"))


def _delete(call: Call) -> int:
    with call.connect() as api:
        if not call.given.yes:
            sweep = api.sweep(call.given.sweep)
            if sweep["finished_at"] is None:  # nobody is asked about what is refused
                raise BadInput(f"sweep {sweep['id']} still runs: {CANCEL_FIRST}")
            jobs = f"the jobs of its {sum(sweep['trials'].values()):,} trials, their models and checkpoints"
            confirm(call, f"delete {sweep['name']} ({sweep['id']}, {sweep['status']}) with {jobs}?")
        gone = api.delete_sweep(call.given.sweep)
    return call.answer(gone, lambda: call.say(f"{gone['id']} is deleted"))


# -- the sweep file ------------------------------------------------------------------------------------------


EXAMPLE = "max_trials=30"
_OF_A_PARAMETER = {field.alias or name for name, field in Parameter.model_fields.items()}


def read_sweep(file: str, changes: Sequence[str]) -> JsonObject:
    """The sweep of a .json file, then `changes` in order. Raises BadInput."""
    sweep = None if file.lower().endswith(ROWS) else object_in(file, "sweep")
    if sweep is None:
        rows = f'{{"job": {{"data": {{"train": "{file}"}}}}, "space": {{…}}}}'
        raise BadInput(
            f"{file} holds rows, and no sweep", hint=f"write a sweep file (.json) whose job names them: {rows}"
        )
    if "data" in sweep and "job" not in sweep:
        raise BadInput(f"{file} is a job, and no sweep", hint=f"submit it with: longhaul submit {shlex.quote(file)}")
    for change in changes:
        _set(sweep, change)
    return sweep


def _set(sweep: JsonObject, change: str) -> None:
    """`max_trials=30`, `job.training.epochs=3`, `space.training.epochs=[2,4]`, `space.training.epochs.int=[2,8]`."""
    (first, *rest), text = split_change(change, EXAMPLE)
    match first, rest:
        case "job", [_, *_]:
            apply_changes(_object(sweep, "job", change), [change.removeprefix("job.")])
        case "space", [*key, last] if key and last in _OF_A_PARAMETER:
            _object(_object(sweep, "space", change), ".".join(key), change)[last] = value_of(text)
        case "space", [_, *_]:
            _object(sweep, "space", change)[".".join(rest)] = value_of(text)
        case _, []:
            sweep[first] = text if first == "name" else value_of(text)
        case _:
            raise BadInput(
                f"--set {change}: {first} has no keys", hint="the keys of the job begin with job., such as job.model"
            )


def _object(of: JsonObject, key: str, change: str) -> JsonObject:
    found = of.setdefault(key, {})
    if not isinstance(found, dict):
        raise BadInput(f"--set {change}: {key} is {found!r} and has no keys")
    return found
