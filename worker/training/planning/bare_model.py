"""A model without weights: the modules that a config.json describes, as `network.model.load` leaves them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from jobs.errors import Rejected
from worker.training.adapters.method import Method
from worker.training.tasks.task import Config, Task


def bare_model(
    config: Config, task: Task, dtype: torch.dtype, *, fused: bool, dropout: float | None, method: Method | None = None
) -> PreTrainedModel:
    """The model in training mode, on the device "meta". Raises Rejected (`bad_config`).

    `method` None: every weight is trained; one that adds to the model raises Rejected, too, where it cannot.
    """
    try:
        with torch.device("meta"):
            model = task.bare(config, dtype)
    except MemoryError:
        raise
    # Whatever transformers raises on a value it did not expect.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        raise Rejected(
            f"model: no {task.name} model can be built from config.json: {reason}",
            code="bad_config",
            param="model",
            hint="take the original file",
        ) from error
    task.configure(model, fused=fused, dropout=dropout)
    if method is not None:
        with torch.device("meta"):
            method.inject(model, 0, task.layout(config).head_modules)
    model.train()
    return model


def give_device(model: nn.Module, device: torch.device) -> None:
    """Put parameters and buffers on another device, without values; shared ones stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                tensors[name] = moved[id(tensor)]  # type: ignore[assignment]  # a moved parameter is a Parameter still
