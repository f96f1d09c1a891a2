"""The loss of a causal model: of the learned tokens alone, for which alone the head is computed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from worker.training.kernels.head_loss import head_loss

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
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits.flatten(0, 1)[places]
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels, reduction="sum")
    hidden: torch.Tensor = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    head: Any = model.get_output_embeddings()
    return head_loss(hidden.flatten(0, 1)[places], head.weight, labels)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are the product of hidden states and the head's weights, and nothing more."""
    head: Any = model.get_output_embeddings()
    changed = any(getattr(model.config, key, None) not in (None, 1, 1.0) for key in CHANGED_LOGITS)
    return type(head) is torch.nn.Linear and head.bias is None and not changed
