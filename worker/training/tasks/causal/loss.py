"""The loss of a causal model: of the learned tokens alone, for which alone the head is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker.training.kernels.causal_attention import LONGEST, causal_attention
from worker.training.kernels.head_loss import head_loss, token_losses
from worker.training.tasks.evaluated import Evaluated

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
