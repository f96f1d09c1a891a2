"""T5's stacks as training needs them: what is added to attention scores is made once a pass, and the host never waits.

The stock code makes a [B, H, Q, K] tensor of bias and mask again in every layer (of zeros, where cross-attention has no
bias) and keeps each for the backward pass; and it asks the device whether anything is masked, up to three times a pass.
Here each stack makes its tensor once, and only as large as it must be:

    encoder            position bias + padding     [1, H, S, S], or [B, H, S, S] where rows are padded
    decoder            position bias + causality   [1, H, T, T]
    cross-attention    padding                     [B, 1, 1, S], or nothing where no row is padded

Whether rows are padded is known where the batch was made: `attention_mask=None` says that none is.

Calls of another shape, such as `generate` makes them (a cache), go through the stock code. Not offered while exchanged:
`output_hidden_states` and `output_attentions`, which transformers records by the exact class of a stack.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.t5.modeling_t5 import T5Stack

from worker.training.tasks.seq2seq.attention import run_block
from worker.training.tasks.seq2seq.compiled import CompiledBlocks


class FusedT5Stack(T5Stack):
    """Encoder or decoder that makes each bias once."""

    compiled: CompiledBlocks | None = None
    """What runs the layers in training mode, if they are compiled."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Any:
        """As T5Stack. The own way is taken without a cache, for masks [B, K] or None, and no options."""
        own = past_key_values is None and not any(options.values()) and self.dtype != torch.float16
        own = own and (input_ids is None) != (inputs_embeds is None)
        if self.is_decoder:
            own = own and use_cache is False and encoder_hidden_states is not None
        if not own or any(mask is not None and mask.ndim != 2 for mask in (attention_mask, encoder_attention_mask)):
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                encoder_hidden_states=encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                inputs_embeds=inputs_embeds,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **options,
            )
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        bias = self._bias(hidden, attention_mask)
        cross_bias = None
        if encoder_hidden_states is not None and encoder_attention_mask is not None:
            cross_bias = lowest_where(~_is_token(encoder_attention_mask), hidden.dtype)
        compiled = self.compiled if self.training else None
        hidden = self.dropout(hidden)
        if compiled and hidden._is_view():
            hidden = hidden.clone()  # no layer but the first one could use the graphs of a view
        for block in self.block:
            run = compiled.run if compiled else run_block
            hidden = block(hidden, bias, encoder_hidden_states, cross_bias, run=run)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.dropout(self.final_layer_norm(hidden)))

    def _bias(self, hidden: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        length = hidden.shape[1]
        attention: Any = self.block.get_submodule("0.layer.0.SelfAttention")
        # Contiguous before anything is added: its heads come last in memory, and what is computed from it would follow.
        position: torch.Tensor = attention.compute_bias(length, length, device=hidden.device).contiguous()
        masked = None
        if self.is_decoder:
            masked = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu_(1)
        if attention_mask is not None:
            padding = ~_is_token(attention_mask)
            masked = padding if masked is None else masked | padding
        return position if masked is None else position + lowest_where(masked, hidden.dtype)


def lowest_where(masked: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The lowest finite number where `masked`, else 0: finite, so that no row of scores can become NaN."""
    return torch.zeros(masked.shape, dtype=dtype, device=masked.device).masked_fill_(masked, torch.finfo(dtype).min)


def _is_token(attention_mask: torch.Tensor) -> torch.Tensor:
    return attention_mask[:, None, None, :] != 0
