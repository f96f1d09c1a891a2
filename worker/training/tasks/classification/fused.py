"""`speed.fused`: cheaper dropout, layers without padding, in place; and the check that a row is the same beside others.

Norms and GELU of encoders are single kernels of torch already. Any encoder may come that transformers knows; what this
code takes for granted of it is checked on the model itself, before it trains.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from jobs.evaluation_metrics import LabelPlan
from jobs.text.units import format_share
from worker.training.dataset.data import Int64, Rows
from worker.training.kernels.dropout import FusedDropout
from worker.training.kernels.packed_attention import PackedRows, packed_attention
from worker.training.tasks.classification.metrics import names, probable, truth_of
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.self_check import SelfCheck, short_rows

# -- packed ------------------------------------------------------------------------------------------------------------
# Encoders of the BERT kind on a CPU: no token of padding goes through a layer, and of the last one only what is asked.
#
# The head of these classifiers looks at the first token of a row. So in the last layer the other tokens are keys and
# values and nothing else. A module's class is exchanged, as in `fused.py`; its layers and their order are those of
# transformers, and so are the numbers.

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
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    lengths: Int64,
    token_types: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, S] padded behind each row, [B, S] 1 where there is a token (None: everywhere), [B] tokens, [B, S] the type of
    each token (None: the model is told of none) -> [B, K]."""
    packs = isinstance(getattr(model.base_model, "encoder", None), PackedEncoder)
    given = {"input_ids": input_ids} | ({} if token_types is None else {"token_type_ids": token_types})
    # A layer that is recomputed is called by transformers.
    if packs and input_ids.device.type == "cpu" and not model.is_activation_checkpointing:
        rows = PackedRows.of(lengths, input_ids.shape[1])
        packed = {name: each.flatten().index_select(0, rows.places)[None] for name, each in given.items()}
        found = model(**packed, position_ids=(rows.within + _first_position(model))[None], packed_rows=rows)
    else:
        if packs and attention_mask is not None:
            # As attention takes it: of another, transformers asks the device whether all is 1, and the host waits.
            attention_mask = attention_mask[:, None, None, :].bool()
        found = model(**given, attention_mask=attention_mask)
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


# -- loss --------------------------------------------------------------------------------------------------------------
# The loss of a classifier: a row is its unit, whatever the number of its labels.


class HeadLoss(Protocol):
    """What a head learns of rows, and what it says of them."""

    def labels(self, rows: Rows, chosen: Int64) -> torch.Tensor:
        """[B, …] what each row has, on the CPU."""

    def empty_labels(self, rows: int, device: torch.device) -> torch.Tensor:
        """Without values."""

    def sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, K] and labels on the same device -> the loss summed over rows (0-dim), in fp32 or better."""

    def of_rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The same -> [B] that of each row."""

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, K] -> [B, …] what the model says, of which metrics are made."""

    def words(self, label: torch.Tensor, logits: torch.Tensor, known: Mapping[int, str]) -> Words:
        """Of one row: its label, and [K], on the CPU; `known`: names of classes by number."""


class Words(NamedTuple):
    """Of one row, for people."""

    target: str
    """What the row has."""
    answer: str
    """What the model says."""
    probability: float | None = None
    """Of the answer, where it has one."""


@dataclass(frozen=True)
class ClassLoss:
    """Cross entropy over the classes; where a row has several labels, binary, the mean over the classes."""

    classes: int
    several: bool = False
    weights: tuple[float, ...] | None = None
    """Of classes: what the loss of a row of that class, or of having that label, is multiplied by."""

    def labels(self, rows: Rows, chosen: Int64) -> torch.Tensor:
        """[B] the number of each row's label; of `several` [B, K], 1 where a row has a label, else 0. int64."""
        return torch.from_numpy(truth_of(rows, chosen, self.classes, several=self.several))

    def empty_labels(self, rows: int, device: torch.device) -> torch.Tensor:
        """Without values."""
        size = (rows, self.classes) if self.several else (rows,)
        return torch.empty(size, dtype=torch.int64, device=device)

    def sum(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, K] and labels on the same device -> the loss summed over rows (0-dim, nats), in fp32 or better."""
        return self._loss(logits, labels, "sum")

    def of_rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The same -> [B] that of each row."""
        losses = self._loss(logits, labels, "none")
        return losses.sum(1) if self.several else losses

    def answers(self, logits: torch.Tensor) -> torch.Tensor:
        """As `probable`."""
        return probable(logits, several=self.several)

    def words(self, label: torch.Tensor, logits: torch.Tensor, known: Mapping[int, str]) -> Words:
        """The label, and the one that is most probable."""
        guess = names(self.answers(logits[None])[0], known)
        likely = None if self.several else float(logits.softmax(-1).max(-1).values)
        return Words(names(label, known), guess, likely)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        weights = None if self.weights is None else wide.new_tensor(self.weights)
        if not self.several:
            return F.cross_entropy(wide, labels, weight=weights, reduction=reduction)
        of_all = F.binary_cross_entropy_with_logits(
            wide, labels.to(wide.dtype), pos_weight=weights, reduction=reduction
        )
        return of_all / self.classes


def balanced(labels: Sequence[LabelPlan], rows: int, *, several: bool) -> tuple[float, ...]:
    """Weights with which every class counts the same, by how many of `rows` have it; their mean over rows is 1.

    Of several labels a row: having a label counts in all as much as not having it. A class of no row has weight 1.
    """
    present = sum(label.rows > 0 for label in labels)
    return tuple(
        1.0 if not label.rows else max(1, rows - label.rows) / label.rows if several else rows / (present * label.rows)
        for label in labels
    )


# -- fused -------------------------------------------------------------------------------------------------------------

_CHECK = SelfCheck(
    "an encoder", "models of the families BERT, RoBERTa, DeBERTa, ModernBERT and DistilBERT are known to work"
)
_TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: 1e-3, torch.float64: 1e-6}
"""Difference of logits, relative to the largest, and of a token's last hidden states, relative to their norm.

In bf16, 24 layers and two kernels of attention differ by up to 0.03 in both. What sees padding changes logits by as
little (ConvBERT 0.01), but the hidden states of the tokens beside it by more (0.09).
"""


def configure(model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
    """As `Task.configure`. Raises Rejected (`self_check_failed`)."""
    if dropout is not None:
        set_dropout(model, dropout)
    if fused:
        fuse(model)
    if model.device.type != "meta":
        check_rows(model)


def fuse(model: nn.Module) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many."""
    found = [module for module in model.modules() if type(module) is nn.Dropout]
    for module in found:
        module.__class__ = FusedDropout
    return len(found) + pack(model)


def check_rows(model: PreTrainedModel) -> None:
    """Refuse `self_check_failed`: rows padded together must have the logits that each has by itself."""
    rows = short_rows(model)
    width = max(map(len, rows))
    pad = int(model.config.pad_token_id or 0)
    ids = torch.stack([F.pad(row, (0, width - len(row)), value=pad) for row in rows])
    mask = torch.stack([F.pad(torch.ones_like(row), (0, width - len(row))) for row in rows])
    with _CHECK.asking(model):
        alone = torch.cat([model(input_ids=row[None]).logits for row in rows]).float()
        together = logits_of(model, ids, mask, np.array([len(row) for row in rows])).float()
        padded = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        for number, row in enumerate(rows):
            hidden = model.base_model(input_ids=row[None]).last_hidden_state[0].float()
            difference = (padded[number, : len(row)] - hidden).norm(dim=-1) / hidden.norm(dim=-1).clamp(min=1e-6)
            if not float(difference.max()) <= _TOLERANCE[model.dtype]:
                place = int(difference.argmax()) + 1
                raise _CHECK.refused(
                    model,
                    f"the hidden states of token {place} of {len(row)} are others by "
                    f"{format_share(float(difference.max()))} beside padding",
                )
    bound = _TOLERANCE[model.dtype] * max(0.1, float(alone.abs().max()))
    if not float((alone - together).abs().max()) <= bound:
        raise _CHECK.refused(
            model,
            f"the logits of a row are {alone[0, :3].tolist()} by itself and {together[0, :3].tolist()} beside another",
        )
