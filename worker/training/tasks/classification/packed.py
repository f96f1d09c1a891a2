"""Encoders of the BERT kind on a CPU: no token of padding goes through a layer, and of the last one only what is asked.

The head of these classifiers looks at the first token of a row. So in the last layer the other tokens are keys and
values and nothing else. A module's class is exchanged, as in `fused.py`; its layers and their order are those of
transformers, and so are the numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from worker.training.dataset.data import Int64
from worker.training.kernels.packed_attention import PackedRows, packed_attention

ENCODERS = ("BertEncoder", "RobertaEncoder", "XLMRobertaEncoder", "CamembertEncoder", "ElectraEncoder")
"""Classes of transformers whose layers and heads do the same."""


class PackedEncoder(nn.Module):
    """An encoder that, given packed rows, returns the last states of their first tokens alone: [B, 1, D]."""

    layer: nn.ModuleList

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, packed_rows: PackedRows | None = None, **options: Any
    ) -> Any:
        """[1, T, D]. Without rows it is transformers' own."""
        if packed_rows is None:
            return super().forward(hidden_states, *arguments, **options)
        rows, hidden = packed_rows, hidden_states[0]
        *before, last = self.layer
        for layer in before:
            hidden = _layer(layer, hidden, hidden, rows)
        hidden = _layer(last, hidden, hidden.index_select(0, rows.firsts), rows)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden.index_select(0, rows.order)[:, None])


def pack(model: nn.Module) -> int:
    """Exchange the encoder where it is one of those that are known, in place; returns how many."""
    found = [module for module in model.modules() if _is_known(module)]
    for module in found:
        module.__class__ = _packed(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever mypy makes of Module
    return len(found)


def logits_of(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, lengths: Int64
) -> torch.Tensor:
    """[B, S] padded behind each row, [B, S] 1 where there is a token (None: everywhere), [B] tokens -> [B, K]."""
    packs = isinstance(getattr(model.base_model, "encoder", None), PackedEncoder)
    # A layer that is recomputed is called by transformers.
    if packs and input_ids.device.type == "cpu" and not model.is_activation_checkpointing:
        rows = PackedRows.of(lengths, input_ids.shape[1])
        ids = input_ids.flatten().index_select(0, rows.places)
        found = model(input_ids=ids[None], position_ids=(rows.within + _first_position(model))[None], packed_rows=rows)
    else:
        if packs and attention_mask is not None:
            # As attention takes it: of another, transformers asks the device whether all is 1, and the host waits.
            attention_mask = attention_mask[:, None, None, :].bool()
        found = model(input_ids=input_ids, attention_mask=attention_mask)
    logits: torch.Tensor = found.logits
    return logits


def _first_position(model: PreTrainedModel) -> int:
    """Number of the embedding of a row's first place: some families count from that of padding."""
    embeddings: Any = model.base_model.embeddings
    counts_from_padding = hasattr(embeddings, "create_position_ids_from_input_ids")
    return int(embeddings.padding_idx) + 1 if counts_from_padding else 0


def _is_known(module: nn.Module) -> bool:
    kind, config = type(module), getattr(module, "config", None)
    return (
        kind.__module__.startswith("transformers.")
        and kind.__name__ in ENCODERS
        and not getattr(config, "is_decoder", False)
        and not getattr(config, "add_cross_attention", False)
    )


@functools.cache
def _packed(kind: Any) -> type[nn.Module]:
    return type(f"Packed{kind.__name__}", (PackedEncoder, kind), {})


def _layer(layer: Any, hidden: torch.Tensor, asked: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """[T, D] -> those of `asked`: all of them, or the first of each row."""
    own = layer.attention.self
    attended = packed_attention(
        own.query(asked), own.key(hidden), own.value(hidden), rows, own.num_attention_heads, own.scaling,
        own.dropout.p if own.training else 0.0,
    )  # fmt: skip
    attended = layer.attention.output(attended, asked)
    result: torch.Tensor = layer.output(layer.intermediate(attended), attended)
    return result
