"""What `longhaul sweep` sends: a sweep file, with changes from the command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from jobs.answers import JsonObject
from jobs.sweeps.space import Parameter
from longhaul.jobfile import ROWS, BadInput, apply_changes, object_in, split_change, value_of

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
