"""Head and loss of T5 in one: logits are held once, in the model's precision, and never in fp32 as a whole.

Plain torch keeps logits [N, V] in bf16, again in fp32, their log-softmax and, going back, its gradient in fp32 and in
bf16: 14 bytes a logit. Here the gradient takes the place of the logits at once, in pieces: 2 bytes. The numbers are
those of `cross_entropy` on fp32 copies of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

IGNORED = -100
"""Label of a padding position; cross entropy passes over it."""


class FusedHead(nn.Linear):
    """A model's `lm_head` that computes its loss."""

    def loss_sum(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[N, d_model], [N] -> negative log likelihood summed over labels other than -100 (0-dim, fp32 or better)."""
        loss: torch.Tensor = _HeadLoss.apply(hidden, self.weight, labels)  # type: ignore[no-untyped-call]  # untyped
        return loss


def token_loss_sum(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Negative log likelihood summed over the labels [B, T] other than -100 (0-dim, nats), in fp32 or better.

    All on the model's device. `attention_mask` [B, S] may be None where no input is padded. The model's own loss would
    be a mean, computed in bf16.
    """
    shifted = model.prepare_decoder_input_ids_from_labels(labels)  # type: ignore[operator]  # typed as Tensor | Module
    if not isinstance(model.lm_head, FusedHead):
        logits: torch.Tensor = model(
            input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=shifted, use_cache=False
        ).logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    # One look-up for both stacks: its gradient is as large as the embedding, and would be made and added twice.
    tokens = torch.cat([input_ids.flatten(), shifted.flatten()])
    inputs, targets = model.get_input_embeddings()(tokens).split([input_ids.numel(), shifted.numel()])
    encoded = model.encoder(  # type: ignore[operator]  # typed as Tensor | Module
        inputs_embeds=inputs.view(*input_ids.shape, -1), attention_mask=attention_mask
    ).last_hidden_state
    decoded = model.decoder(  # type: ignore[operator]  # typed as Tensor | Module
        inputs_embeds=targets.view(*shifted.shape, -1),
        encoder_hidden_states=encoded,
        encoder_attention_mask=attention_mask,
        use_cache=False,
    ).last_hidden_state
    if model.config.scale_decoder_outputs:
        decoded = decoded * model.config.d_model**-0.5
    return model.lm_head.loss_sum(decoded.flatten(0, 1), labels.flatten())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = hidden @ weight.T
        counts = labels != IGNORED
        total = torch.zeros((), dtype=_wide(hidden.dtype), device=hidden.device)
        for piece, label, count in zip(*(t.split(_rows(logits)) for t in (logits, labels, counts)), strict=True):
            index = label.clamp(min=0)[:, None]
            likelihood = piece.log_softmax(-1, dtype=total.dtype)
            total -= (likelihood.gather(1, index)[:, 0] * count).sum()
            if ctx.needs_input_grad[0]:
                piece.copy_(likelihood.exp_().scatter_add_(1, index, likelihood.new_full(index.shape, -1.0)))
        ctx.save_for_backward(hidden, weight, logits, counts)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, logits, counts = ctx.saved_tensors
        # Rows that do not count have a gradient in `logits`, too; multiplied by 0 it comes to nothing.
        scale = (counts * gradient).to(hidden.dtype)[:, None]
        return (logits @ weight).mul_(scale), logits.T @ (hidden * scale), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _rows(logits: torch.Tensor) -> int:
    # fp32 copies of a piece: on the CPU 8 MiB, which stays in its caches; on a GPU 256 MiB, for few kernels.
    numbers = 2**21 if logits.device.type == "cpu" else 2**26
    return max(1, numbers // logits.shape[1])
