"""SweepSpec: what to try, how trials are chosen, and when the sweep ends."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from jobs.errors import UserError
from jobs.evaluation_metrics import EvaluationMetric
from jobs.frozen import Part
from jobs.spec import JobSpec, MetricName, canonical_sha256, parse_spec
from jobs.sweeps.space import MOST_TRIALS, Key, Parameter, Settings, Value, spelled_out
from jobs.wrong_spec import explain

MOST_PARAMETERS = 32
DEFAULT_TRIALS = 20
MOST_VALUES = 2000
"""Choices and bounds of all parameters together: each is tried in a job when a sweep is submitted."""
MOST_STEPS = 10**9
"""Of a range or an integer."""
MOST_WHOLE = 2**53
"""Bound of an integer: beyond it a float cannot tell neighbours apart."""
ASHA_FROM = 50
"""Trials below which successive halving mostly stops those that would have caught up."""
KEYS_OF_A_SWEEP = "`longhaul keys --sweep` and docs/reference/sweep.md list the keys of a sweep"
_OF_ROWS = ("no_rows", "no_usable_columns", "too_many_invalid_rows")
"""Codes of errors that other columns, limits or tokenizers may mend."""
_OF_MEMORY = ("does_not_fit", "host_memory")
"""Codes of errors that other settings of a job may mend, whatever is named."""
_QUOTED = re.compile(r'space\."([\w.]+)"')
_MEANT = re.compile(r"(?<=did you mean )[\w.]+(?: or [\w.]+)*(?=\?)")


class SweepSpec(Part):
    """A job, the settings in which its trials differ, and how they are chosen. `job` and `space` are required."""

    name: Annotated[str, Field(min_length=1, max_length=50)] = "sweep"
    """Shown wherever the sweep is; its trials are called after it."""
    job: dict[str, Any]
    """The job that each trial is, but for the parameters of `space`."""
    space: Annotated[
        dict[Key, Annotated[Parameter, BeforeValidator(spelled_out, json_schema_input_type=Parameter | list[Value])]],
        Field(min_length=1, max_length=MOST_PARAMETERS),
    ]
    """By the dotted key of the job, such as `training.learning_rate`: the values that are tried. A list stands for
    `{"choice": [...]}`."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """`tpe`: near the settings that did well (tree-structured Parzen estimator), after ten random ones. `grid`: every
    combination, in order."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Of the sampler."""
    metric: MetricName | None = None
    """By what trials are compared, on the held-out rows; null: the job's `checkpoint.best`, or the loss."""
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    """`auto`: that of the metric."""
    max_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = None
    """Trials at most; null: 20, or every combination of a grid. Never more than there are combinations."""
    max_hours: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Hours from the first trial on; then those that run are stopped."""
    max_failures: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = 3
    """So many failed trials in a row with the same cause end the sweep."""
    seeds: Annotated[int, Field(ge=1, le=10)] = 1
    """Jobs of a trial, which differ in `training.seed`; the trial's value is their mean."""
    pruning: Literal["none", "median", "asha"] = "none"
    """Which trials are stopped early. `median`: worse than half of the others at the same evaluation. `asha`: not among
    the best third at the 1st, 3rd, 9th … evaluation; better from 50 trials on."""
    keep_models: Literal["best", "all"] = "best"
    """`best`: a trial that has ended keeps its model and its checkpoints only as long as it is the best so far. `all`:
    every trial does."""
    parallel: Annotated[int, Field(ge=1, le=64)] | None = None
    """Trials that are open at the same time; null: those that train and two more, at most one more than there are
    slots."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        seen: list[str] = []
        for key, parameter in self.space.items():
            if key.split(".")[0] == "name":
                raise ValueError(f"space.{key}: trials are called after the sweep")
            for other in parameter.when:
                if other not in seen:
                    raise ValueError(f"space.{key}.when: {other!r} must be a parameter before it")
            seen.append(key)
            if self.sampler == "grid" and parameter.listed is None:
                if parameter.span is None or parameter.step is not None:
                    most = f"a grid takes at most {MOST_TRIALS:,} values of a key"
                    raise ValueError(f"space.{key}: {most}: give {'a choice' if parameter.log else 'a larger step'}")
                raise ValueError(f"space.{key}: a grid needs choice, int, or range with a step")
        right = "maximize" if self.by.higher_is_better else "minimize"
        if self.direction not in ("auto", right):
            raise ValueError(f"direction: of {self.by.value} a sweep can only {right}")
        return self

    @property
    def by(self) -> EvaluationMetric:
        """The metric by which trials are compared."""
        checkpoint = self.job.get("checkpoint")
        named = checkpoint.get("best") if isinstance(checkpoint, dict) else None
        known = next((metric for metric in EvaluationMetric if metric.value == named), EvaluationMetric.LOSS)
        return self.metric or known

    def reports_to(self, integration: str) -> bool:
        """Whether this integration hears of it: as the job says."""
        integrations = self.job.get("integrations")
        return not isinstance(integrations, dict) or integrations.get(integration, True) not in (False, None)

    @cached_property
    def countable(self) -> bool:
        """Whether `grid` has every combination: of each parameter all values can be listed."""
        return all(parameter.listed is not None for parameter in self.space.values())

    @cached_property
    def most_trials(self) -> int:
        """Trials at most: no more than there are combinations, which would only be repeated."""
        most = self.max_trials or (MOST_TRIALS if self.sampler == "grid" else DEFAULT_TRIALS)
        return sum(1 for _ in itertools.islice(self.grid(), most)) if self.countable else most

    @cached_property
    def warnings(self) -> list[str]:
        """What a user would want to know before it begins."""
        found, most = [], self.most_trials
        if self.pruning == "asha" and most < ASHA_FROM:
            found.append(
                f"asha with {most} trials mostly stops those that learn slowly at first: "
                f"it pays from {ASHA_FROM} on; `median` stops fewer"
            )
        if self.sampler == "grid":
            tried = list(itertools.islice(self.grid(), most + 1))
            if len(tried) > most:
                values = {key: {json.dumps(each.get(key)) for each in tried[:most]} for key in self.space}
                alone = [key for key, seen in values.items() if len(seen) == 1 < len(self.space[key].listed or [])]
                only = f", with one value of {', '.join(alone)}" if alone else ""
                found.append(f"the grid has more combinations than {most:,}: the first {most:,} are tried{only}")
        return found

    @property
    def first(self) -> Settings:
        """The first value of every parameter that is active beside those before it."""
        return _completed(self, {})

    def may_mend(self, code: str, param: str | None) -> bool:
        """Whether other settings may make a job of one to which *check* gives this error."""
        parts = {key.partition(".")[0] for key in self.space}
        if code in _OF_MEMORY:
            return parts != {"training"}
        if code in _OF_ROWS and not parts.isdisjoint(("data", "model", "task")):
            return True
        of_rows = param is not None and param.startswith(("data.train", "data.validation"))
        near = [key for key in self.space if f"{key}.".startswith(f"{param}.") or f"{param}.".startswith(f"{key}.")]
        return bool(near) or (not of_rows and not parts.isdisjoint(("model", "task")))

    def grid(self) -> Iterator[Settings]:
        """Every combination of the values, in the order of the parameters; the last one changes first."""
        yield from self._combinations(list(self.space.items()), {})

    def _combinations(self, left: list[tuple[str, Parameter]], chosen: Settings) -> Iterator[Settings]:
        if not left:
            yield dict(chosen)
            return
        (key, parameter), rest = left[0], left[1:]
        if not parameter.active(chosen):
            yield from self._combinations(rest, chosen)
            return
        for value in parameter.listed or []:
            yield from self._combinations(rest, {**chosen, key: value})

    def given(self, settings: Mapping[str, Value]) -> dict[str, Any]:
        """The job with these settings, as parsed JSON. Raises UserError where one cannot be put into it."""
        given: dict[str, Any] = json.loads(json.dumps(self.job))
        for key, value in settings.items():
            _assign(given, key, copy.deepcopy(value))  # a parameter after it may change an object
        return given

    def trial(self, settings: Mapping[str, Value], number: int = 0, seed: int = 0) -> JobSpec:
        """A job of a trial. Raises UserError. `seed`: added to `training.seed`."""
        given = self.given(settings)
        given["name"] = f"{self.name} {number}" + (f" seed {seed}" if seed else "")
        if self.metric is not None:
            _assign(given, "checkpoint.best", self.metric.value)
        if seed:
            _assign(given, "training.seed", parse_spec(given).training.seed + seed)
        return parse_spec(given)

    def sha256(self) -> str:
        """Hash of the canonical JSON, with the defaults of this version."""
        return canonical_sha256(self.model_dump(mode="json", by_alias=True))


def parse_sweep(raw: object, check: Callable[[JobSpec], object] = lambda _: None) -> SweepSpec:
    """A SweepSpec from parsed JSON, each of whose values makes a job; or UserError, naming the key.

    `check` is called with jobs that together have every choice, and both ends of every range. It may raise UserError.
    """
    if not isinstance(raw, Mapping):
        raise UserError("a sweep is a JSON object", hint='the minimum is {"job": {…}, "space": {…}}')
    try:
        spec = SweepSpec.model_validate(raw)
    except ValidationError as error:
        raise _spelled(explain(error, SweepSpec, keys=KEYS_OF_A_SWEEP)) from None
    if spec.seeds > 1 and "training.seed" in spec.space:
        raise UserError(
            "space.training.seed: `seeds` above 1 sets the seeds of a trial's jobs", param="space.training.seed"
        )
    for key, parameter in spec.space.items():  # not in the model: sweeps that are stored stay readable
        _check_numbers(key, parameter)
        _check_conditions(spec, key)
    if (count := sum(len(parameter.examples) for parameter in spec.space.values())) > MOST_VALUES:
        raise UserError(f"space: {count:,} choices and bounds; at most {MOST_VALUES:,}", param="space")
    for key, settings in _examples(spec):
        try:
            trial = spec.trial(settings)
            if trial.resources.gpus != 1:
                raise UserError("resources.gpus: trials train on one GPU each", param="resources.gpus")
            if trial.resources.engine is not None:
                raise UserError("resources.engine: trials train on Longhaul's own machines", param="resources.engine")
            if trial.kind == "train" and trial.data.validation == 0:
                raise UserError(
                    "data.validation: 0 holds no rows out, and by these trials are compared",
                    hint="give a fraction, such as 0.1, or a file of rows to judge by",
                    param="data.validation",
                )
            check(trial)
        except UserError as error:
            offender = error.param if error.param in spec.space else key
            if offender and (condition := _condition(spec, offender, settings)) is not None:
                error = UserError(
                    str(error), hint=f'only some trials have it: add "when": {condition}', param=error.param
                )
            raise _of_the_sweep(error, spec, key) from None
    return spec


def _condition(spec: SweepSpec, key: str, settings: Settings) -> str | None:
    """A value of another key of its object beside which these settings make a job, as JSON; None: there is none."""
    for other in spec.space if key in spec.space else ():
        if other == key:
            return None
        if other.rpartition(".")[0] == key.rpartition(".")[0]:
            for value in spec.space[other].examples:
                with suppress(UserError):
                    spec.trial(_completed(spec, {**settings, other: value}))
                    return json.dumps({other: value})
    return None


def _check_numbers(key: str, parameter: Parameter) -> None:
    """Raises UserError for a step that leads nowhere, and for more values than a sampler can count."""
    if parameter.choice is not None:
        return
    low, high = parameter.bounds
    if parameter.whole is not None and max(abs(low), abs(high)) > MOST_WHOLE:
        raise UserError(f"space.{key}: integers are between −2^53 and 2^53", param=f"space.{key}")
    if parameter.step is None:
        return
    if parameter.steps > MOST_STEPS:
        raise UserError(
            f"space.{key}: there are more than {MOST_STEPS:,} steps of {parameter.step:g} from {low:g} to {high:g}",
            hint="raise `step`, or leave it out",
            param=f"space.{key}",
        )
    if parameter.steps < 1:
        raise UserError(
            f"space.{key}: from {low:g}, a step of {parameter.step:g} leads beyond {high:g}: there is one value",
            hint="lower `step`, or give the value in `job`",
            param=f"space.{key}",
        )


def _check_conditions(spec: SweepSpec, key: str) -> None:
    """Raises UserError for a condition that no trial can meet, and for a key that one after it overwrites."""
    for other, wanted in spec.space[key].when.items():
        values = wanted if isinstance(wanted, list) else [wanted]
        wrong = [value for value in values if not spec.space[other].can_be(value)]
        if wrong or not values:
            raise UserError(
                f"space.{key}.when: {other} is never {json.dumps(wrong[0]) if wrong else 'a value of an empty list'}",
                hint=f"give values that space.{other} has",
                param=f"space.{key}",
            )
    later = list(spec.space)[list(spec.space).index(key) + 1 :]
    if (above := next((each for each in later if key.startswith(f"{each}.")), None)) is not None:
        raise UserError(
            f"space.{key}: {above}, which comes after it, overwrites it",
            hint=f"put {above} before {key}",
            param=f"space.{key}",
        )


def _of_the_sweep(error: UserError, spec: SweepSpec, key: str) -> UserError:
    """An error of one of its jobs, with the key as the sweep has it: in `space`, or below `job`.

    `key`: the parameter by which the job differs from one that is right.
    """
    if error.param == "checkpoint.best" and spec.metric is not None:
        return UserError(f"metric{str(error).removeprefix(error.param)}", hint=error.hint, param="metric")
    if error.param == "name":
        return UserError(str(error), hint=error.hint, param="name")
    place = "space" if error.param is not None and _from_the_space(error.param, spec) else "job"
    param = place if error.param is None else f"{place}.{error.param}"
    hint = error.hint and _MEANT.sub(lambda keys: f"{place}." + keys[0].replace(" or ", f" or {place}."), error.hint)
    if key and place == "job":
        return UserError(f"space.{key}: {error}", hint=hint, param=f"space.{key}")
    named = error.param is not None and str(error).startswith(error.param)
    return UserError(f"{place}{'.' if named else ': '}{error}", hint=hint, param=param)


def _from_the_space(param: str, spec: SweepSpec) -> bool:
    """Whether `space` has this key; or keys below it, of which the job has none."""
    below = any(key.startswith(f"{param}.") for key in spec.space)
    return param in spec.space or (below and param.partition(".")[0] not in spec.job)


def _spelled(error: UserError) -> UserError:
    """With keys of `space` as people write them, and the key where a message begins with it."""
    message, param, hint = (
        None if text is None else _QUOTED.sub(r"space.\1", text.replace('."[key]"', ""))
        for text in (str(error), error.param, error.hint)
    )
    return UserError(message or "", hint=hint, param=param or (message or "").partition(": ")[0])


def _examples(spec: SweepSpec) -> Iterator[tuple[str, Settings]]:
    """The first settings of all, then others that differ in one parameter, with the key of that.

    Raises UserError for a parameter that is active in no trial.
    """
    yield "", spec.first
    for key, parameter in spec.space.items():
        needed = _needed(spec, key)
        for value in parameter.examples:
            yield key, _completed(spec, {**needed, key: value})


def _completed(spec: SweepSpec, fixed: Mapping[str, Value]) -> Settings:
    """These, and the first value of every other parameter that is active beside them."""
    settings: Settings = {}
    for key, parameter in spec.space.items():
        if parameter.active(settings):
            settings[key] = fixed[key] if key in fixed else parameter.examples[0]
    return settings


def _needed(spec: SweepSpec, key: str) -> Settings:
    """Values of other parameters beside which this one is active. Raises UserError where there are none."""
    needed: Settings = {}
    conditions = [spec.space[key].when]
    for other in reversed(spec.space):  # a condition names parameters before it
        asked = [when[other] for when in conditions if other in when]
        if not asked:
            continue
        lists = [wanted if isinstance(wanted, list) else [wanted] for wanted in asked]
        found = [value for value in lists[0] if all(value in each for each in lists[1:])]
        if not found:
            raise UserError(
                f"space.{key}: no trial has it, for its conditions want values of {other} that exclude each other",
                param=f"space.{key}",
            )
        needed[other] = found[0]
        conditions.append(spec.space[other].when)
    return needed


def _assign(given: dict[str, Any], key: str, value: Value) -> None:
    """Set a dotted key. Raises UserError where a part before the last is no object."""
    *parents, last = key.split(".")
    for depth, parent in enumerate(parents, 1):
        inner = given.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UserError(f"{'.'.join(parents[:depth])} is {json.dumps(inner)} in the job, and no object")
        given = inner
    given[last] = value
