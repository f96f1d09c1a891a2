"""Which linear layers get an adapter; what cannot have one is refused by name."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

from torch import nn

from jobs.errors import Rejected
from jobs.spec import ALL_LINEAR, LoraMethod
from worker.training.machine.cpu_limit import Endless, cpu_limit
from worker.training.tasks.layout import within

log = logging.getLogger("longhaul.trainer")
_TARGETS = "method.targets"
_LONGEST_S = 10.0
"""Processor time to compare a pattern with all names; a sound one takes less than a millisecond."""


def targets_of(model: nn.Module, method: LoraMethod, head_modules: Collection[str] = ()) -> list[str]:
    """Names of the modules, in the order of the model. `head_modules`: those that are trained whole.

    Raises Rejected: `no_such_target`, `endless_pattern`, `target_not_linear`, `target_is_head`, `rank_too_large`.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    output = _output_of(model)
    whole = {name for name in modules if within(name, head_modules)}
    head = whole | {name for name, module in modules.items() if module is output}
    if method.targets == ALL_LINEAR:
        found = _all_linear(modules, head)
    else:
        named = _matching(modules, method.targets, _endings(modules, head))
        found = [name for name in named if name not in whole]
        if not found:
            raise _refused("target_is_head", f"{_some(named)}: the head is trained whole", "name layers of the encoder")
    others = [f"{name} ({type(modules[name]).__name__})" for name in found if not isinstance(modules[name], nn.Linear)]
    if others:
        endings = _endings(modules, head)
        raise _refused(
            "target_not_linear",
            f"{_some(others)}: adapters are for linear layers",
            f"name layers such as {_some(endings)}" if endings else "train the model with method: full",
        )
    if any(name in head for name in found):
        raise _refused("target_is_head", "the output head gets no adapter", "leave it out")
    _check_rank(modules, found, method.rank)
    return found


def _all_linear(modules: Mapping[str, nn.Module], head: Collection[str]) -> list[str]:
    """Every linear layer but the head and gates of width 1; the log says which matrices are left out, if any are."""
    linear = {name: each for name, each in modules.items() if isinstance(each, nn.Linear) and name not in head}
    found = [name for name, layer in linear.items() if min(layer.in_features, layer.out_features) > 1]
    matrices = {
        f"{name}.{key}".removesuffix(".weight"): parameter.numel()
        for name, module in modules.items()
        if name not in head and not isinstance(module, nn.Embedding)
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
    }
    left_out = [name for name in matrices if name not in found]
    if not found:
        others = sorted({type(modules[name]).__name__ for name in left_out if name in modules})
        raise _refused(
            "no_such_target",
            f"the model has no linear layer but its head{f'; its matrices are in {_some(others)}' if others else ''}",
            "train it with method: full",
        )
    if left_out:
        log.info(
            "targets %s: adapters for %.1f %% of the numbers in matrices; none for %d that are gates of width 1 or in "
            "no linear layer: %s",
            ALL_LINEAR,
            100 * sum(matrices[name] for name in found) / sum(matrices.values()),
            len(left_out),
            _some(left_out),
        )
    return found


def shortened(model: nn.Module, targets: Collection[str]) -> list[str]:
    """The fewest endings of names that stand for these modules and no other, as peft reads a list of targets."""
    names = [name for name, _ in model.named_modules() if name]
    wanted = set(targets)
    by_ending: dict[str, set[str]] = {}
    for name in names:
        by_ending.setdefault(name.rpartition(".")[2], set()).add(name)
    short: set[str] = set()
    for name in targets:
        ending = name.rpartition(".")[2]
        short.add(ending if by_ending[ending] <= wanted else name)
    return sorted(short)


def _matching(names: Collection[str], targets: str | list[str], endings: list[str]) -> list[str]:
    if isinstance(targets, str):
        try:
            with cpu_limit(_LONGEST_S):
                found = [name for name in names if re.fullmatch(targets, name)]
        except Endless as error:
            raise _refused(
                "endless_pattern",
                f"{targets!r} is a regular expression that takes too long to compare with the names: {error}",
                "avoid a repetition inside of another, such as (a+)+; or write a list of the endings of names",
            ) from None
        if not found:
            raise _refused(
                "no_such_target",
                f"no module of the model has a whole name like {targets!r}",
                f"the text is a regular expression; for the endings of names write a list: {json.dumps([targets])}",
            )
        return found
    for each in targets:
        if not any(_ends(name, each) for name in names):
            near = get_close_matches(each, endings, 1)
            raise _refused(
                "no_such_target",
                f"no module of the model has a name that ends in {each!r}",
                f"{f'did you mean {near[0]!r}? ' if near else ''}its linear layers are {', '.join(endings)}",
            )
    return [name for name in names if any(_ends(name, each) for each in targets)]


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _check_rank(modules: dict[str, nn.Module], targets: Iterable[str], rank: int) -> None:
    small = []
    for name in targets:
        layer = modules[name]
        assert isinstance(layer, nn.Linear), "others are refused before"
        if rank > min(layer.in_features, layer.out_features):
            small.append(f"{name} ({layer.out_features} × {layer.in_features})")
    if small:
        raise Rejected(
            f"method.rank is {rank}, and {len(small)} of the layers have a smaller side: {_some(small)}",
            code="rank_too_large",
            param="method.rank",
            hint="an adapter of that rank is larger than what it adapts: lower the rank, or leave those layers out of "
            "method.targets",
        )


def _output_of(model: nn.Module) -> nn.Module | None:
    """The output head, as transformers knows it."""
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, nn.Module) else None


def _endings(modules: Mapping[str, nn.Module], head: Collection[str]) -> list[str]:
    """Of the linear layers that may have an adapter."""
    linear = (name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in head)
    return list(dict.fromkeys(name.rpartition(".")[2] for name in linear))


def _some(names: Collection[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:5]) + (", …" if len(shown) > 5 else "")


def _refused(code: str, message: str, hint: str) -> Rejected:
    return Rejected(f"{_TARGETS}: {message}", code=code, param=_TARGETS, hint=hint)
