"""What a sweep tries next: a function of its specification and its events, so that after a crash it is the same.

Optuna is asked and told, with a study in memory that is made anew each time.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jobs.sweeps.record import SweepRecord, TrialRecord
from jobs.sweeps.space import Parameter, Settings, Value
from jobs.sweeps.spec import SweepSpec

if TYPE_CHECKING:
    import optuna

log = logging.getLogger("longhaul.sweeps")
DIGITS = 4
"""Of a suggested number: more would tell nobody anything."""
MOST_ASKED = 10
"""Times that a sampler is asked for settings that were not tried, where they can be counted."""


def suggest(spec: SweepSpec, record: SweepRecord) -> Settings | None:
    """The settings of the next trial; None: each combination of the grid was tried."""
    number = len(record.trials)
    if spec.sampler == "grid":
        return next((settings for place, settings in enumerate(spec.grid()) if place == number), None)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Each trial has random numbers of its own, whichever ended before it.
    seed = random.Random(f"{spec.seed} {number}").getrandbits(32)
    sampler: optuna.samplers.BaseSampler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is called experimental has been there for years
        if spec.sampler == "random":
            sampler = optuna.samplers.RandomSampler(seed=seed)
        else:
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
        study = _study(spec, record, sampler)
        settings = _sampled(spec, study)
        if not spec.countable:
            return settings
        tried = {_text(trial.settings) for trial in record.trials}
        for _ in range(MOST_ASKED - 1):
            if _text(settings) not in tried:
                return settings
            settings = _sampled(spec, study)
    # The sampler insists. Of one combination more than were tried, one is new, unless there are no more.
    first = itertools.islice(spec.grid(), len(tried) + 1)
    return next((each for each in (settings, *first) if _text(each) not in tried), settings)


def _sampled(spec: SweepSpec, study: optuna.Study) -> Settings:
    """What the sampler suggests. The study has it as a trial that runs: asked again, it keeps away from that."""
    asked = study.ask()
    settings: Settings = {}
    for key, parameter in spec.space.items():
        if parameter.active(settings):
            settings[key] = _asked(asked, key, parameter)
    return settings


def _text(value: Value) -> str:
    """The same for equal values, and for no others: 1 and true differ."""
    return json.dumps(value, sort_keys=True)


def importances(spec: SweepSpec, record: SweepRecord) -> dict[str, float]:
    """How much of the differences between trials each parameter explains, the largest first; empty: nobody can tell."""
    values = {trial.value for trial in record.trials if trial.outcome == "succeeded"}
    if len(values) < 4:
        return {}
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        try:
            study = _study(spec, record, optuna.samplers.RandomSampler())
            return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))
        except (ValueError, RuntimeError) as error:
            log.info("sweep %s: the importance of its parameters cannot be told: %s", record.id, error)
            return {}


def _study(spec: SweepSpec, record: SweepRecord, sampler: optuna.samplers.BaseSampler) -> optuna.Study:
    """All trials so far, in the order in which they began."""
    import optuna

    study = optuna.create_study(direction="maximize" if spec.by.higher_is_better else "minimize", sampler=sampler)
    for trial in record.trials:
        if all(key in spec.space for key in trial.settings):
            study.add_trial(_told(spec, trial))
    return study


def _told(spec: SweepSpec, trial: TrialRecord) -> optuna.trial.FrozenTrial:
    """A trial as Optuna knows it. A cancelled one says nothing of its settings.

    Optuna's samplers pass over failed trials, and would try their corner again and again: one that failed is told as
    one that was pruned before its first evaluation, which is worse than all others.
    """
    from optuna.trial import TrialState, create_trial

    states: Mapping[str | None, TrialState] = {
        "succeeded": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.PRUNED,
        None: TrialState.RUNNING,
    }  # fmt: skip
    pruned = {} if trial.pruned is None else {trial.pruned.step: trial.pruned.value}
    return create_trial(
        state=states.get(trial.outcome, TrialState.FAIL),
        params={key: _external(spec.space[key], value) for key, value in trial.settings.items()},
        distributions={key: _distribution(spec.space[key]) for key in trial.settings},
        value=trial.value if trial.outcome == "succeeded" else None,
        intermediate_values=pruned,
    )


def _asked(trial: optuna.Trial, key: str, parameter: Parameter) -> Value:
    if parameter.choice is not None:
        return parameter.choice[trial.suggest_categorical(key, range(len(parameter.choice)))]
    low, high = parameter.bounds
    if parameter.whole is not None:
        return trial.suggest_int(key, int(low), int(high), step=int(parameter.step or 1), log=parameter.log)
    if parameter.step is not None:
        return parameter.after(trial.suggest_int(key, 0, math.floor(parameter.steps)))
    found = trial.suggest_float(key, low, high, log=parameter.log)
    return min(high, max(low, float(f"{found:.{DIGITS}g}")))


def _external(parameter: Parameter, value: Value) -> Any:
    """As Optuna has it: of choices their place, for it takes no lists, and of a range with a step the number of steps,
    for it would compare floats.
    """
    if parameter.choice is None:
        if parameter.span is not None and parameter.step is not None and isinstance(value, int | float):
            return parameter.step_of(value)
        return value
    return [_text(each) for each in parameter.choice].index(_text(value))


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choice is not None:
        return CategoricalDistribution(range(len(parameter.choice)))
    low, high = parameter.bounds
    if parameter.whole is not None:
        return IntDistribution(int(low), int(high), log=parameter.log, step=int(parameter.step or 1))
    if parameter.step is not None:
        return IntDistribution(0, math.floor(parameter.steps))
    make: Callable[..., FloatDistribution] = FloatDistribution
    return make(low, high, log=parameter.log)
