"""`speed.fused`: modules of causal models exchanged for faster ones, in place, and the check that all is as it was.

What is exchanged is a module's class, nothing else: parameters and attributes are the same in both. Any family may
come that transformers knows; what this code takes for granted of it is checked on the model itself, before it trains.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jobs.errors import Rejected
from jobs.text.units import format_number
from worker.training.kernels.causal_attention import LONGEST, causal_attention
from worker.training.kernels.dropout import FusedDropout
from worker.training.kernels.gradient_sums import SummedEmbedding
from worker.training.kernels.head_loss import head_loss, token_losses
from worker.training.kernels.rms_norm import gated_silu, rms_norm
from worker.training.tasks.compiled import set_dropout
from worker.training.tasks.evaluated import Evaluated
from worker.training.tasks.self_check import SelfCheck, short_rows

# -- loss --------------------------------------------------------------------------------------------------------------
# The loss of a causal model: of the learned tokens alone, for which alone the head is computed.

_UNMASKED = "sdpa_unmasked"
"""An attention for which transformers has no function that makes masks."""
_UNUSUAL = frozenset({"position_bias", "cache", "softcap", "output_attentions"})
"""Options with which attention is more than a product, a softmax and a product."""
CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of a config.json by which logits are more than the product of head and hidden states."""


def learned_loss_sum(
    model: PreTrainedModel, input_ids: torch.Tensor, places: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Negative log likelihood summed over labels [N] (0-dim, nats), in fp32 or better.

    `input_ids` [B, S] are padded behind each row; `places` [N] are positions in them, flattened. All on the model's
    device.
    """
    if not has_plain_head(model):
        return F.cross_entropy(_logits(model, input_ids, places), labels, reduction="sum")
    return head_loss(*_learned(model, input_ids, places), labels)


def learned_evaluated(
    model: PreTrainedModel, input_ids: torch.Tensor, places: torch.Tensor, labels: torch.Tensor
) -> Evaluated:
    """The same, without gradients, with [N] that of each label, and whether it is the most probable one."""
    if has_plain_head(model):
        return Evaluated(*token_losses(*_learned(model, input_ids, places), labels))
    logits = _logits(model, input_ids, places)
    losses = F.cross_entropy(logits, labels, reduction="none")
    return Evaluated(losses.sum(), losses, logits.argmax(-1) == labels)


def _logits(model: PreTrainedModel, input_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[N, V] in fp32 or better."""
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)[places]
    return logits if logits.dtype == torch.float64 else logits.float()


def _learned(
    model: PreTrainedModel, input_ids: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, D], [V, D] whose product are the logits of the learned tokens."""
    with _without_mask(model, input_ids.shape[1]):
        hidden: torch.Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    head: Any = model.get_output_embeddings()
    # Some keep what runs through their layers in fp32, such as Mamba.
    return hidden.flatten(0, 1)[places].to(head.weight.dtype), head.weight


@contextmanager
def _without_mask(model: PreTrainedModel, width: int) -> Iterator[None]:
    """Inside, no attention mask is made: transformers asks the device whether one is needed, for which the host waits.

    None is, where positions are those of one row and no window is shorter than it. The kernel is the same one, also for
    a layer that is recomputed later, which has kept that there is no mask. On a CPU short rows have their own, unless
    layers are recomputed.
    """
    if not needs_no_mask(model, width):
        yield
        return
    config: Any = model.config.get_text_config()
    # A layer that is recomputed later finds the usual attention again: the first time must be the same.
    usual = model.device.type != "cpu" or model.is_activation_checkpointing
    ALL_ATTENTION_FUNCTIONS.register(_UNMASKED, sdpa_attention_forward if usual else _attend)
    config._attn_implementation = _UNMASKED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def needs_no_mask(model: PreTrainedModel, width: int) -> bool:
    """Whether rows of up to `width` tokens that are padded behind go through the model's attention without a mask."""
    config: Any = model.config.get_text_config()
    if getattr(config, "alibi", False):  # the biases are added to the mask
        return False
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return config._attn_implementation in ("sdpa", _UNMASKED) and (window is None or width <= window)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[B, H, S, D], [B, K, S, D] twice -> [B, S, H, D]; an attention function of transformers."""
    if torch.compiler.is_compiling():  # its pieces would be cut by symbols
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    plain = attention_mask is None and dropout == 0 and not _UNUSUAL.intersection(options)
    causal = options.get("is_causal", getattr(module, "is_causal", False)) is True
    short = query.shape[2] == key.shape[2] <= LONGEST
    if query.device.type != "cpu" or scaling is None or not (plain and causal and short):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    return causal_attention(query, key, value, scaling), None


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are the product of hidden states and the head's weights, and nothing more."""
    if model.base_model is model:  # what is below the head has another name than transformers gives, as in Llama 4
        return False
    head: Any = model.get_output_embeddings()
    changed = any(getattr(model.config, key, None) not in (None, 1, 1.0) for key in CHANGED_LOGITS)
    return type(head) is torch.nn.Linear and head.bias is None and not changed


# -- fused -------------------------------------------------------------------------------------------------------------

NORMS = (
    "LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Phi3RMSNorm", "Olmo2RMSNorm", "SmolLM3RMSNorm",
)  # fmt: skip
"""Classes of transformers that all compute weight · x / sqrt(mean square + variance_epsilon)."""
GATES = ("LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP")
"""Those that all compute down_proj(act_fn(gate_proj(x)) · up_proj(x))."""
_CHECK = SelfCheck(
    "a causal model", "models of the families Llama, Mistral, Qwen2, Qwen3, Gemma and Phi-3 are known to work"
)
_TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative difference of the loss. Stock modules round after every operation, and take norms in fp32 in any case."""


def configure(model: PreTrainedModel, *, fused: bool, dropout: float | None) -> None:
    """As `Task.configure`. Raises Rejected (`self_check_failed`)."""
    if dropout is not None:
        set_dropout(model, dropout)
    if getattr(model.config, "output_router_logits", False):  # for a loss that is not computed; it breaks generation
        model.config.output_router_logits = False
    expected = None if model.device.type == "meta" else stock_loss(model)
    if fused:
        fuse(model)
    if expected is not None:
        check_loss(model, expected)


def fuse(model: nn.Module) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many."""
    count = 0
    for module in model.modules():
        kind = _fused(type(module))  # type: ignore[arg-type]  # a class is hashable, whatever mypy makes of Module
        if kind is not None and (not issubclass(kind, _FusedGate) or _is_silu(module.act_fn)):
            module.__class__ = kind
            count += 1
    return count


@functools.cache
def _fused(kind: Any) -> type[nn.Module] | None:
    """What takes the place of a class; None: it stays."""
    if kind is nn.Dropout:
        return FusedDropout
    if kind is nn.Embedding:  # exactly: others do more, such as scale
        return SummedEmbedding
    if kind.__module__.startswith("transformers."):
        for names, fused in ((NORMS, _FusedNorm), (GATES, _FusedGate)):
            if kind.__name__ in names:
                return type(f"Fused{kind.__name__}", (fused, kind), {})
    return None


def _is_silu(activation: Any) -> bool:
    return type(activation) in (nn.SiLU, SiLUActivation)


class _FusedNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class _FusedGate(nn.Module):
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))
        return down


# -- the check -------------------------------------------------------------------------------------------------------


def stock_loss(model: PreTrainedModel) -> list[float]:
    """Of two short rows, each by itself, by the model's own forward pass: of all their tokens but the first."""
    with _CHECK.asking(model):
        found = []
        for ids in short_rows(model):
            logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            found.append(float(F.cross_entropy(logits.double(), ids[1:], reduction="sum")))
        return found


def check_loss(model: PreTrainedModel, expected: list[float]) -> None:
    """Refuse `self_check_failed`: the rows padded together, as training takes them, must have the same losses."""
    rows = short_rows(model)
    width = max(map(len, rows))
    ids = torch.stack([F.pad(row, (0, width - len(row))) for row in rows])
    with _CHECK.asking(model):
        for number, (row, loss) in enumerate(zip(rows, expected, strict=True)):
            places = number * width + torch.arange(len(row) - 1, device=ids.device)
            found = float(learned_loss_sum(model, ids, places, row[1:]))
            if model.dtype == torch.float16 and not math.isfinite(loss):
                raise Rejected(
                    f"model: {type(model).__name__} does not work in float16: the loss of {len(row)} tokens is {loss}, "
                    "since what the model computes exceeds the range of float16",
                    code="no_float16",
                    param="method.base_dtype",
                    hint="set method.base_dtype: bfloat16, for which a GPU must have compute capability 8.0 or newer "
                    "(RTX 30, A100, and newer); or take a model of another family",
                )
            if not abs(found - loss) <= _TOLERANCE[model.dtype] * abs(loss):
                raise _CHECK.refused(
                    model,
                    f"the loss of a row is {format_number(loss, 6)} by itself and {format_number(found, 6)} "
                    "beside another",
                )
