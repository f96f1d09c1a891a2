"""The loss of seq2seq: with a fused head, head and loss are one (`kernels/head_loss.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from worker.training.kernels.head_loss import IGNORED, head_loss, token_losses
from worker.training.tasks.evaluated import Evaluated


class FusedHead(nn.Linear):
    """A model's `lm_head` that computes its loss."""

    def loss_sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, d_model], [N] -> negative log likelihood summed over labels other than -100 (0-dim, fp32 or better)."""
        return head_loss(hidden, self.weight, labels)


def token_loss_sum(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Negative log likelihood summed over the labels [B, T] other than -100 (0-dim, nats), in fp32 or better.

    All on the model's device. `attention_mask` [B, S] may be None where no input is padded. The model's own loss would
    be a mean, computed in bf16.
    """
    if isinstance(model.lm_head, FusedHead):
        return model.lm_head.loss_sum(_decoded(model, input_ids, attention_mask, labels), labels.flatten())
    logits = _logits(model, input_ids, attention_mask, labels)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


def tokens_evaluated(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor
) -> Evaluated:
    """The same, without gradients, with [B * T] that of each label, and whether it is the most probable one."""
    targets = labels.flatten()
    if isinstance(model.lm_head, FusedHead):
        hidden = _decoded(model, input_ids, attention_mask, labels)
        return Evaluated(*token_losses(hidden, model.lm_head.weight, targets))
    logits = _logits(model, input_ids, attention_mask, labels)
    losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    return Evaluated(losses.sum(), losses, logits.argmax(-1) == targets)


def _logits(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """[B * T, V] in fp32 or better."""
    shifted = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]  # typed as Tensor | Module
    logits: torch.Tensor = model(
        input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=shifted, use_cache=False
    ).logits.flatten(0, 1)
    return logits if logits.dtype == torch.float64 else logits.float()


def _decoded(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """[B * T, d_model] what a fused head is given."""
    shifted = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]  # typed as Tensor | Module
    # One look-up for both stacks: its gradient is as large as the embedding, and would be made and added twice.
    tokens = torch.cat([input_ids.flatten(), shifted.flatten()])
    inputs, targets = model.get_input_embeddings()(tokens).split([input_ids.numel(), shifted.numel()])
    encoded = model.encoder(  # type: ignore[operator]  # typed as Tensor | Module
        inputs_embeds=inputs.view(*input_ids.shape, -1), attention_mask=attention_mask
    ).last_hidden_state
    decoded: torch.Tensor = model.decoder(  # type: ignore[operator]  # typed as Tensor | Module
        inputs_embeds=targets.view(*shifted.shape, -1),
        encoder_hidden_states=encoded,
        encoder_attention_mask=attention_mask,
        use_cache=False,
    ).last_hidden_state
    if getattr(model.config, "scale_decoder_outputs", False):  # mT5 has no such thing
        decoded = decoded * model.config.d_model**-0.5
    return decoded.flatten(0, 1)
