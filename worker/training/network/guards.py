"""Guards on a loaded model: they refuse, naming tensors, and never repair (architecture.md: Model).

Why never: giving meta tensors fresh storage keeps none of the trained values, and a bare `tie_weights()` overwrites
FLAN-T5's trained head. A model that is not exactly what its files say must not be trained for days.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from jobs.errors import GpuLost, Rejected
from worker.training.machine.device import has_native_bf16
from worker.training.models.layout import MISSING, UNEXPECTED, reject_tensors, tied_head, untied_head
from worker.training.tasks.layout import Layout

_PROCESS_HINT = (
    "the files are not at fault, this process is: run the trainer alone in it, with the versions of the lock file"
)


def check_device(device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Refuse `no_native_bf16`: emulated (GPUs before Ampere) it is several times slower. GpuLost without a GPU.

    `dtype`: of the model; None: it is not known yet. The worker saw a usable one before it took the job.
    """
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise GpuLost("LONGHAUL_DEVICE is cuda, but the trainer sees no usable CUDA device")
    if dtype == torch.bfloat16 and not has_native_bf16(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise Rejected(
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no native bf16",
            code="no_native_bf16",
            hint="use a GPU of compute capability 8.0 or newer (Ampere, Ada, Hopper, Blackwell), or submit the job "
            "again with method: lora, which trains beside a model in float16 there",
        )


def check_all_loaded(info: Mapping[str, Any]) -> None:
    """Refuse `missing_keys`, `unexpected_keys`, `mismatched_shapes` from the loading info of `from_pretrained`."""
    # A mismatched entry is (name, shape in the file, shape in the model).
    mismatched = [
        f"{entry[0]} {tuple(entry[1])} in the file, {tuple(entry[2])} in the model"
        if isinstance(entry, tuple)
        else str(entry)
        for entry in info["mismatched_keys"]
    ]
    reject_tensors("mismatched_shapes", mismatched, "of other shapes than config.json asks for")
    reject_tensors("missing_keys", info["missing_keys"], MISSING)
    reject_tensors("unexpected_keys", info["unexpected_keys"], UNEXPECTED)
    if info.get("error_msgs"):
        raise Rejected(f"the weights did not load: {info['error_msgs'][0]}", code="load_errors")


def check_placement(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse `meta_tensor`, `wrong_dtype`, `wrong_device`, `offload_hook`. Buffers may have other dtypes."""
    parameters = dict(model.named_parameters())
    tensors = parameters | dict(model.named_buffers())
    meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    reject_tensors("meta_tensor", meta, "without values (meta device)", hint=_PROCESS_HINT)
    other = [f"{name} ({tensor.dtype})" for name, tensor in parameters.items() if tensor.dtype != dtype]
    reject_tensors("wrong_dtype", other, f"not {dtype}")
    check_device_of(model, device)
    hooked = [name or type(model).__name__ for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    why = "with an accelerate hook, which moves weights during the forward pass"
    reject_tensors("offload_hook", hooked, why, kind="modules", hint=_PROCESS_HINT)


def check_device_of(model: nn.Module, device: torch.device) -> None:
    """Refuse `wrong_device`."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    away = [f"{name} ({tensor.device})" for name, tensor in tensors.items() if not _same_device(tensor.device, device)]
    reject_tensors("wrong_device", away, f"not on {device}", hint=_PROCESS_HINT)


def check_tie(model: nn.Module, layout: Layout, folder: Path) -> None:
    """Refuse `tied_head` and `untied_head`: whether the head is the embedding must be what config.json says.

    `layout` is that of config.json as it is in `folder`; transformers rewrites it in memory.
    """
    tied = model.get_parameter(layout.head) is model.get_parameter(layout.embedding)
    if tied and not layout.tied:
        stored = layout.head in stored_names(folder)
        raise tied_head(layout, f"has the same values as {layout.embedding}" if stored else "is not among the weights")
    if not tied and layout.tied:
        raise untied_head(layout)


def check_not_copied(model: nn.Module, pointers: Mapping[str, int], *, added: bool = False) -> None:
    """Refuse `copied_weights`: every parameter must still lie where `from_pretrained` put it.

    `added`: parameters were added to the model since, and layers got longer names; only addresses are compared.
    """
    moved = moved_parameters(model, pointers)
    if added:
        there = set(pointers_of(model).values())
        moved = sorted(name for name, pointer in pointers.items() if pointer not in there)
    reject_tensors("copied_weights", moved, "no longer at the address they were loaded to")


def pointers_of(model: nn.Module) -> dict[str, int]:
    """Address of every parameter."""
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def moved_parameters(model: nn.Module, pointers: Mapping[str, int]) -> list[str]:
    """Names of the parameters that are not (or no longer) at the given address."""
    now = pointers_of(model)
    return sorted(name for name in now.keys() | pointers.keys() if now.get(name) != pointers.get(name))


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in the safetensors files of a model folder."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return names


def _same_device(one: torch.device, other: torch.device) -> bool:
    # "cuda" means the current GPU, which is the only one a trainer sees.
    return one.type == other.type and (one.index or 0) == (other.index or 0)
