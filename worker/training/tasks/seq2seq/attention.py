"""Attention and layers of T5 that get from their stack what to add to the scores, once for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.t5.modeling_t5 import T5Attention, T5Block

from worker.training.kernels.dropout import dropout


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, rate: float
) -> torch.Tensor:
    """Attention without scaling (T5 has none): [B, H, Q, D], [B, H, K, D] twice -> [B, H, Q, D].

    `bias` is added to the scores and must be broadcastable to [B, H, Q, K]. `rate` is that of the dropout on attention
    weights.
    """
    kernel = _in_steps if query.device.type == "cpu" else _in_one
    return kernel(query, key, value, bias, rate)


def _in_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, rate: float
) -> torch.Tensor:
    if bias is None or query.shape[-1] % 8 or bias.shape[-1] % 8:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=rate, scale=1.0)
    # The kernel that torch's function would choose, by name: compiled, that function first copies the bias, and each
    # layer keeps its copy for the backward pass (96 MiB in FLAN-T5-XL's encoder at 6 x 512).
    attended: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias.expand(*query.shape[:3], key.shape[2]), torch.is_grad_enabled(), rate, scale=1.0
    )[0]
    return attended


def _in_steps(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, rate: float
) -> torch.Tensor:
    # On the CPU, with dropout, torch's function takes the same steps in fp32, which for bf16 lasts twice as long, and
    # looks for rows without any key besides, of which there are none here.
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        scores += bias
    return dropout(scores.softmax(-1), rate) @ value


class FusedT5Attention(T5Attention):
    """Attention that takes its whole bias from the stack, when called with `combined`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        mask: torch.Tensor | None = None,
        key_value_states: torch.Tensor | None = None,
        *arguments: Any,
        combined: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """[B, Q, d_model], and [B, K, d_model] for cross-attention -> [B, Q, d_model]. `mask`: see `attend`."""
        if not combined:
            stock: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None] = super().forward(
                hidden_states, mask, key_value_states, *arguments, **options
            )
            return stock
        source = hidden_states if key_value_states is None else key_value_states
        rate = self.dropout if self.training else 0.0
        mixed = attend(
            self._heads(self.q(hidden_states)), self._heads(self.k(source)), self._heads(self.v(source)), mask, rate
        )
        return self.o(mixed.transpose(1, 2).flatten(2)), None, None

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        apart: torch.Tensor = states.unflatten(-1, (self.n_heads, self.key_value_proj_dim))
        return apart.transpose(1, 2)


def run_block(
    block: T5Block,
    hidden: torch.Tensor,
    bias: torch.Tensor,
    encoded: torch.Tensor | None,
    cross_bias: torch.Tensor | None,
) -> torch.Tensor:
    """One layer: [B, Q, d_model] -> the same. `encoded` [B, K, d_model] in the decoder only."""
    attention, *cross_attention, feed_forward = block.layer
    hidden = attention(hidden, attention_mask=bias, combined=True)[0]
    for layer in cross_attention:
        hidden = layer(hidden, key_value_states=encoded, attention_mask=cross_bias, combined=True)[0]
    return feed_forward(hidden)  # type: ignore[no-any-return]  # calling a module gives Any


class FusedT5Block(T5Block):
    """A layer that is run by `run` (a function like `run_block`), if given; recomputed like the stock one."""

    def forward(self, *arguments: Any, run: Callable[..., torch.Tensor] | None = None, **options: Any) -> Any:
        """With `run`: arguments and result of `run_block`."""
        return super().forward(*arguments, **options) if run is None else run(self, *arguments)
