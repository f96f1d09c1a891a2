"""Adapters are trained beside a model that stays as it is (LoRA, rsLoRA, DoRA), with the modules of peft (ADR 0008).

peft puts its layers into the model in place: nothing wraps the model, no weight of it is copied or converted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from jobs.errors import Rejected
from jobs.spec import LoraMethod
from worker.training.adapters.flops import AdapterFlops
from worker.training.adapters.full import dtype_name
from worker.training.adapters.merging import Merged, adapted_layers
from worker.training.adapters.method import BaseModel, Method
from worker.training.adapters.targets import shortened, targets_of
from worker.training.models.layout import reject_tensors
from worker.training.models.model_files import CONFIG
from worker.training.tasks.layout import Layout, within
from worker.training.tasks.task import Config, Flops

if TYPE_CHECKING:
    from peft import LoraConfig

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
