"""Adapters merged into the weights beside which they were trained, in fp32 or better, and rounded once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from worker.training.adapters.method import Full, weights_of

_BASE = ".base_layer"


@dataclass(frozen=True)
class Merged(Full):
    """`Method` of a result: the whole model, with the adapters in its weights. Nothing is trained so."""

    def weights(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Under the names of the model without adapters, in `dtype`."""
        return MergedWeights(model, self.dtype)


class MergedWeights(Mapping[str, torch.Tensor]):
    """Weights of a model with its adapters in them: each is made when it is asked for, and nobody keeps it."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._layers, self._dtype = adapted_layers(model), dtype
        own = {name: each for name, each in weights_of(model).items() if ".lora_" not in name}
        self._tensors = {name.replace(f"{_BASE}.", "."): each for name, each in own.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        if key == "weight" and owner in self._layers:
            return merged_weight(self._layers[owner]).to(self._dtype)
        return self._tensors[name].to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Of all of them; a merged weight has the size of its own."""
        return sum(each.numel() * self._dtype.itemsize for each in self._tensors.values())


def adapted_layers(model: nn.Module) -> Mapping[str, Any]:
    """The modules with an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@torch.no_grad()
def merged_weight(layer: Any) -> torch.Tensor:
    """Of a layer of peft: W + scale · B·A in fp32, or in what `Widened` makes of it.

    With DoRA each row is as long as it has learned.
    """
    [name] = layer.active_adapters
    wide = torch.float32
    weight = layer.base_layer.weight.to(wide)
    whole = weight + layer.scaling[name] * (layer.lora_B[name].weight.to(wide) @ layer.lora_A[name].weight.to(wide))
    if layer.use_dora[name]:
        length = torch.linalg.vector_norm(whole, dim=1, keepdim=True)
        whole = whole * (layer.lora_magnitude_vector[name].weight.to(wide)[:, None] / length)
    merged: torch.Tensor = whole
    return merged


def rounded_weight(layer: Any) -> torch.Tensor:
    """The same in the type of the model, as it is written."""
    return merged_weight(layer).to(layer.base_layer.weight.dtype)


@contextlib.contextmanager
def computed_merged(model: nn.Module, *, rounded: bool) -> Iterator[None]:
    """Inside, adapted layers compute with the merged weight, rounded as it is written or not; their tensors stay."""
    layers = list(adapted_layers(model).values())
    for layer in layers:
        layer.forward = _merged_forward(layer, rounded=rounded)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _merged_forward(layer: Any, *, rounded: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(values: torch.Tensor) -> torch.Tensor:
        if rounded:
            with torch._C.DisableTorchFunction():  # exactly what is written, whatever mode is on
                weight = rounded_weight(layer)
        else:
            weight = merged_weight(layer)
        result: torch.Tensor = F.linear(values, weight, layer.base_layer.bias)
        return result

    return forward
