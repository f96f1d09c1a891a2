"""A model without weights: the modules that a config.json describes, as `network.model.load` leaves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    T5ForConditionalGeneration,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jobs.errors import Refused
from worker.training.models.layout import said_untied
from worker.training.network.model import set_dropout
from worker.training.network.t5 import fuse

TaskKind = Literal["seq2seq", "causal", "classification"]
_CLASSES: dict[TaskKind, Any] = {
    "seq2seq": AutoModelForSeq2SeqLM,
    "causal": AutoModelForCausalLM,
    "classification": AutoModelForSequenceClassification,
}


def bare_model(
    config: Mapping[str, Any], task: TaskKind, dtype: torch.dtype, *, fused: bool, dropout: float | None
) -> PreTrainedModel:
    """The model in training mode, on the device "meta". Only a T5 is fused.

    Whether the head of a T5 is tied is as config.json says, from which transformers departs. Raises Refused
    (`bad_config`).
    """
    try:
        kind = CONFIG_MAPPING[config["model_type"]]
        with torch.device("meta"):
            model: PreTrainedModel = _CLASSES[task].from_config(kind.from_dict(dict(config)), dtype=dtype)
        if task == "seq2seq" and getattr(model.config, "decoder_start_token_id", None) is None:
            raise ValueError("it has no decoder_start_token_id, with which every target begins")
    # Whatever transformers raises on a value it did not expect.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        raise Refused(
            f"model: no {task} model can be built from config.json: {reason}",
            code="bad_config",
            param="model",
            hint="take the original file",
        ) from error
    if isinstance(model, T5ForConditionalGeneration):
        if said_untied(config):
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        if fused:
            fuse(model)
    if dropout is not None:
        set_dropout(model, dropout)
    model.train()
    return model


def give_device(model: nn.Module, device: torch.device) -> None:
    """Put parameters and buffers on another device, without values; what is shared stays shared."""
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
