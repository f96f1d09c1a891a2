"""Adapters are trained beside a model that stays as it is (LoRA, rsLoRA, DoRA), with the modules of peft (ADR 0008).

peft puts its layers into the model in place: nothing wraps the model, no weight of it is copied or converted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from jobs.errors import Rejected
from jobs.memory_plan import DType
from jobs.spec import ALL_LINEAR, FullMethod, JobSpec, LoraMethod
from worker.training.adapters.merging import Merged, adapted_layers
from worker.training.adapters.method import BaseModel, Full, Method, dtype_name
from worker.training.machine.host import Endless, cpu_limit
from worker.training.models.layout import reject_tensors
from worker.training.models.model_files import CONFIG
from worker.training.steps.shape import Lengths
from worker.training.tasks.layout import Layout, within
from worker.training.tasks.task import Config, Flops

if TYPE_CHECKING:
    from peft import LoraConfig

# -- flops -------------------------------------------------------------------------------------------------------------
# FLOPs of training adapters beside a model that stays as it is.
#
# Going back, no gradient of the model's own weights is computed: of the three products of a layer (forward, gradient
# of its input, gradient of its weight) two are left. An adapter has all three. Its weights are taken to meet as many
# tokens as the model's do on average. The second product in the backward pass of attention is not counted, a small
# part.


@dataclass(frozen=True)
class AdapterFlops:
    """`Flops` of a model with adapters that have `share` times as many weights as it."""

    model: Flops
    share: float

    def rows(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """Forward and backward."""
        return (2.0 + 3.0 * self.share) * self.model.forward(input_lengths, target_lengths)

    def forward(self, input_lengths: Lengths, target_lengths: Lengths) -> float:
        """One forward pass."""
        return (1.0 + self.share) * self.model.forward(input_lengths, target_lengths)


# -- targets -----------------------------------------------------------------------------------------------------------
# Which linear layers get an adapter; what cannot have one is refused by name.

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
    """Every linear layer but the head, routers and gates of width 1; the log says which matrices are left out."""
    linear = {name: each for name, each in modules.items() if isinstance(each, nn.Linear) and name not in head}
    found = [
        name
        for name, layer in linear.items()
        if min(layer.in_features, layer.out_features) > 1 and not _is_router(name, layer, modules)
    ]
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
            "targets %s: adapters for %.1f %% of the numbers in matrices; none for %d that are routers, gates of width "
            "1 or in no linear layer: %s",
            ALL_LINEAR,
            100 * sum(matrices[name] for name in found) / sum(matrices.values()),
            len(left_out),
            _some(left_out),
        )
    return found


def _is_router(name: str, layer: nn.Linear, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it chooses among experts: beside it, or the module that it is in, are those of as many as its outputs."""
    parent = name.rpartition(".")[0]
    beside = (modules.get(f"{each}.experts") for each in (parent, parent.rpartition(".")[0]))
    tensors = (each for experts in beside if experts is not None for each in experts.parameters(recurse=False))
    return any(each.ndim > 2 and len(each) == layer.out_features for each in tensors)


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


# -- wide --------------------------------------------------------------------------------------------------------------
# A model computed in wide numbers as it lies in memory, without a copy: each weight is widened where it is used.


class Widened(TorchFunctionMode):
    """Inside, functions get `wide` in place of floats with fewer bits, tensors and dtypes alike.

    What a function would change in place must be wide already: of a narrow tensor it would change a copy. So this is
    for forward passes alone, in which activations are wide from the embedding on and no weight is changed.
    """

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._dtype = wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, on wide numbers."""
        if func is torch.Tensor.float:
            func, args = torch.Tensor.to, (*args[:1], self._dtype)
        elif func == torch._grouped_mm:  # of experts; it takes no numbers as wide as these
            func, kwargs = torch.ops.transformers.grouped_mm_fallback, {"offs": kwargs["offs"]}
        return func(*tree_map(self._wide, args), **tree_map(self._wide, kwargs or {}))

    def _wide(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._dtype) if self._narrow(value.dtype) else value
        return self._dtype if isinstance(value, torch.dtype) and self._narrow(value) else value

    def _narrow(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize < self._dtype.itemsize


# -- lora --------------------------------------------------------------------------------------------------------------

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
"""In front of every name in the files of peft."""
_ADAPTER_NAME = "default"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_PIECE = 2**26
"""Bytes hashed at a time."""
_OUR_FAULT = "this is a fault of Longhaul, or of the installed peft: run the versions of the lock file"


@dataclass(frozen=True)
class Lora:
    """See `Method`."""

    settings: LoraMethod
    dtype: torch.dtype = torch.bfloat16
    whole: ClassVar[bool] = False
    weights_file: ClassVar[str] = ADAPTER
    library: ClassVar[str] = "peft"

    @property
    def description(self) -> str:
        """See `Method`."""
        settings = self.settings
        kind = " and ".join(name for name, on in (("DoRA", settings.dora), ("rsLoRA", settings.rslora)) if on) or "LoRA"
        targets = settings.targets if isinstance(settings.targets, str) else ", ".join(settings.targets)
        return (
            f"{kind}: rank {settings.rank}, alpha {settings.scale:g}, dropout {settings.dropout:g}, targets {targets}, "
            f"{dtype_name(self.adapter_dtype)}" + (" beside float16" if self.dtype == torch.float16 else "")
        )

    @property
    def memory_key(self) -> str:
        """See `Method`. Of alpha nothing depends, of dropout only whether there is any."""
        plain = {"alpha": None, "rslora": False, "dropout": float(self.settings.dropout > 0)}
        return repr(replace(self, settings=self.settings.model_copy(update=plain)))

    @property
    def adapter_dtype(self) -> torch.dtype:
        """Of the adapters: what the job sets; else that of the model, but never float16, in which updates get lost."""
        asked = self.settings.adapter_dtype
        if asked == "auto":
            return torch.float32 if self.dtype == torch.float16 else torch.bfloat16
        return _DTYPES[asked]

    def inject(self, model: nn.Module, seed: int, head_modules: Collection[str] = ()) -> None:
        """See `Method`. Raises Rejected as `targets_of`, `check` and `check_float16` do."""
        from peft import inject_adapter_in_model

        if self.dtype == torch.float16:
            check_float16(model, head_modules)
        targets = targets_of(model, self.settings, head_modules)
        with _seeded(seed):
            inject_adapter_in_model(self._config(targets), model, _ADAPTER_NAME)
        for _, parameter in adapter_parameters(model):
            parameter.data = parameter.data.to(self.adapter_dtype)
        for name in head_modules:
            model.get_submodule(name).requires_grad_(True)
        check(model, targets, self.adapter_dtype, head_modules)

    def weights(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """See `Method`; under the names of peft's files."""
        from peft import get_peft_model_state_dict

        named = get_peft_model_state_dict(model, save_embedding_layers=False)
        return {f"{_PREFIX}{name}": tensor.detach() for name, tensor in (named | head_parameters(model)).items()}

    def untrained_sha256(self, model: nn.Module) -> str | None:
        """See `Method`."""
        digest = hashlib.sha256()
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
                flat = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
                for piece in flat.split(_PIECE):
                    digest.update(piece.cpu().numpy().data)
        return digest.hexdigest()

    def flops(self, model: Flops, trained: int, layout: Layout) -> Flops:
        """See `Method`."""
        return AdapterFlops(model, max(0, trained - layout.head_parameters) / layout.parameters)

    @property
    def merged(self) -> Method | None:
        """See `Method`."""
        return Merged(self.dtype) if self.settings.merge else None

    def result_bytes(self, trained: int, model: int) -> int:
        """See `Method`."""
        return trained + (model if self.settings.merge else 0)

    def configs(
        self, model: nn.Module, config: Config, layout: Layout, base: BaseModel
    ) -> Mapping[str, Mapping[str, object]]:
        """adapter_config.json, as peft writes it; the targets by the endings of their names.

        With a head of labels also config.json, which names them: where the model comes from, nobody knows them.
        """
        written = self._config(shortened(model, adapted_layers(model)))
        if layout.head_modules:
            written.task_type, written.modules_to_save = "SEQ_CLS", sorted(layout.head_modules)
        written.base_model_name_or_path, written.revision = base.name, base.revision
        written.inference_mode = True
        written.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
        content: dict[str, object] = written.to_dict()  # type: ignore[no-untyped-call]  # untyped
        own = {key: sorted(each) if isinstance(each, set) else each for key, each in content.items()}
        return {ADAPTER_CONFIG: own} | ({CONFIG: config} if layout.head_modules else {})

    def opening(self, auto_class: str, base: BaseModel, layout: Layout) -> list[str]:
        """See `Method`."""
        revision, dtype = f', revision="{base.revision}"' if base.revision else "", dtype_name(self.dtype)
        as_trained = "" if self.adapter_dtype == torch.float32 else ", autocast_adapter_dtype=False"
        if layout.head_modules:
            kind, of_labels = "AutoConfig", ', config=AutoConfig.from_pretrained(".")'
        else:
            kind, of_labels = "GenerationConfig", ""
        # Of no hub model there is a name that others know.
        own = "" if base.revision else "  # elsewhere than where the job ran: your copy of this base model"
        return [
            "from peft import PeftModel",
            f"from transformers import {kind}, {auto_class}, AutoTokenizer",
            "",
            f'base = {auto_class}.from_pretrained("{base.name}"{revision}{of_labels}, dtype="{dtype}"){own}',
            *([] if of_labels else ['base.generation_config = GenerationConfig.from_pretrained(".")  # this folder']),
            f'model = PeftModel.from_pretrained(base, "."{as_trained}).eval()',
        ]

    def _config(self, targets: list[str]) -> LoraConfig:
        from peft import LoraConfig

        settings = self.settings
        return LoraConfig(
            r=settings.rank,
            lora_alpha=settings.scale,  # type: ignore[arg-type]  # any number does
            lora_dropout=settings.dropout,
            target_modules=targets,
            use_rslora=settings.rslora,
            use_dora=settings.dora,
            bias="none",
        )


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of the adapters, by name: of an adapted module all but its base layer's."""
    for name, layer in adapted_layers(model).items():
        for key, parameter in layer.named_parameters():
            if not key.startswith("base_layer."):
                yield f"{name}.{key}", parameter


def head_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that are trained and belong to no adapter: of a classifier's head."""
    adapters = dict(adapter_parameters(model))
    return {name: each for name, each in model.named_parameters() if each.requires_grad and name not in adapters}


def check(model: nn.Module, targets: list[str], dtype: torch.dtype, head_modules: Collection[str] = ()) -> None:
    """Refuse `adapters_misplaced`, `wrong_trainable`, `wrong_dtype`, `wrong_device`, naming modules and tensors."""
    placed = set(adapted_layers(model)) ^ set(targets)
    reject_tensors("adapters_misplaced", placed, "with an adapter too many or none", kind="modules", hint=_OUR_FAULT)
    adapters = dict(adapter_parameters(model))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = {name for name, _ in model.named_parameters() if within(name, head_modules)}
    odd = trained ^ (adapters.keys() | head)
    reject_tensors(
        "wrong_trainable", odd, "trained that are neither adapters nor head, or not trained", hint=_OUR_FAULT
    )
    others = [f"{name} ({parameter.dtype})" for name, parameter in adapters.items() if parameter.dtype != dtype]
    reject_tensors("wrong_dtype", others, f"not {dtype}", hint=_OUR_FAULT)
    device = next(model.parameters()).device
    away = [f"{name} ({parameter.device})" for name, parameter in adapters.items() if parameter.device != device]
    reject_tensors("wrong_device", away, f"not on {device}", hint=_OUR_FAULT)


def check_float16(model: nn.Module, head_modules: Collection[str]) -> None:
    """Refuse `no_float16`: layers that transformers keeps in float32 there, or a head that would be trained in it."""
    hint = (
        "set method.base_dtype: bfloat16, for which a GPU must have compute capability 8.0 or newer (RTX 30, "
        "A100, and newer); or take a model of another family"
    )
    if head_modules:
        raise Rejected(
            f"{type(model).__name__} is not trained in float16: its head ({', '.join(head_modules)}) is trained whole, "
            "and float16 loses updates",
            code="no_float16",
            param="method.base_dtype",
            hint=hint.partition(";")[0],
        )
    listed = getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = {part for name, _ in model.named_parameters() for part in name.split(".") if part in listed}
    if kept:
        raise Rejected(
            f"{type(model).__name__} does not work in float16: transformers keeps its {', '.join(sorted(kept))} in "
            "float32 there, since what these layers compute exceeds the range of float16",
            code="no_float16",
            param="method.base_dtype",
            hint=hint,
        )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Adapters are drawn on the host, whatever device they go to; its generator is put back."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


# -- the method of a job -------------------------------------------------------------------------------------


def method_of(spec: JobSpec, dtype: DType) -> Method:
    """`method` of a job, as the trainer asks it; `dtype`: of its model, as planned."""
    planned: torch.dtype = getattr(torch, dtype)
    if isinstance(spec.method, FullMethod):
        return Full(planned, evaluated=spec.kind == "evaluate")
    return Lora(spec.method, planned)
