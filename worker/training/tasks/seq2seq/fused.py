"""`speed.fused`: modules of T5 exchanged for faster ones, in place. The same formulas; weights and config.json stay.

mT5's modules are T5's under other names. Of other families only dropout and tanh GELU are exchanged.

What is exchanged is a module's class, nothing else: parameters and attributes are the same in both, so nothing is
copied and nothing moves. In fp32 the results agree to rounding. In bf16 GELU and norm compute in fp32 and round once,
where the stock modules, which also keep most intermediates for the backward pass, round after every operation.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import NewGELUActivation
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Block, MT5LayerNorm, MT5Stack
from transformers.models.t5.modeling_t5 import T5Attention, T5Block, T5LayerNorm, T5Stack

from worker.training.kernels.dropout import FusedDropout
from worker.training.kernels.rms_norm import rms_norm
from worker.training.tasks.seq2seq.attention import FusedT5Attention, FusedT5Block, run_block
from worker.training.tasks.seq2seq.compiled import CompiledBlocks
from worker.training.tasks.seq2seq.loss import FusedHead

# -- stack -------------------------------------------------------------------------------------------------------------
# T5's stacks as training needs them: what is added to attention scores is made once a pass, and the host never waits.
#
# The stock code makes a [B, H, Q, K] tensor of bias and mask again in every layer (of zeros, where cross-attention has
# no bias) and keeps each for the backward pass; and it asks the device whether anything is masked, up to three times a
# pass. Here each stack makes its tensor once, and only as large as it must be:
#
#     encoder            position bias + padding     [1, H, S, S], or [B, H, S, S] where rows are padded
#     decoder            position bias + causality   [1, H, T, T]
#     cross-attention    padding                     [B, 1, 1, S], or nothing where no row is padded
#
# Whether rows are padded is known where the batch was made: `attention_mask=None` says that none is.
#
# Calls of another shape, such as `generate` makes them (a cache), go through the stock code. Not offered while
# exchanged: `output_hidden_states` and `output_attentions`, which transformers records by the exact class of a stack.


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


# -- fused -------------------------------------------------------------------------------------------------------------

Patch = Literal["gelu", "norm", "attention", "dropout", "head"]


class FusedGELU(NewGELUActivation):
    """tanh GELU in one kernel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Any shape."""
        return F.gelu(input, approximate="tanh")


class FusedT5LayerNorm(T5LayerNorm):
    """RMS norm over the last dimension in one kernel."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., d_model]; the mean of squares is taken in fp32 for bf16 input, as the stock module does."""
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class FusedMT5LayerNorm(FusedT5LayerNorm, MT5LayerNorm):
    """Of an mT5."""


class FusedMT5Attention(FusedT5Attention, MT5Attention):  # type: ignore[misc]  # another config class
    """Of an mT5."""


class FusedMT5Block(FusedT5Block, MT5Block):
    """Of an mT5."""


class FusedMT5Stack(FusedT5Stack, MT5Stack):  # type: ignore[misc]  # as above
    """Of an mT5."""


PATCHES: dict[Patch, dict[type[nn.Module], type[nn.Module]]] = {
    "gelu": {NewGELUActivation: FusedGELU},
    "norm": {T5LayerNorm: FusedT5LayerNorm, MT5LayerNorm: FusedMT5LayerNorm},
    "attention": {
        T5Attention: FusedT5Attention,
        T5Block: FusedT5Block,
        T5Stack: FusedT5Stack,
        MT5Attention: FusedMT5Attention,
        MT5Block: FusedMT5Block,
        MT5Stack: FusedMT5Stack,
    },
    "dropout": {nn.Dropout: FusedDropout},
    "head": {nn.Linear: FusedHead},
}
"""Each can be switched by itself. `head` concerns the module `lm_head` of a T5 or mT5 alone."""
ALL: tuple[Patch, ...] = tuple(PATCHES)


def fuse(model: nn.Module, patches: Collection[Patch] = ALL) -> int:
    """Exchange the stock modules for fused ones, in place; returns how many. Other kinds of modules are left alone."""
    return sum(_exchange(model, patch, PATCHES[patch]) for patch in patches)


def unfuse(model: nn.Module, patches: Collection[Patch] = ALL) -> int:
    """Undo `fuse`; returns how many modules were changed back."""
    return sum(_exchange(model, patch, {fused: stock for stock, fused in PATCHES[patch].items()}) for patch in patches)


def has_t5_stacks(model: nn.Module) -> bool:
    """Whether encoder and decoder are those of a T5 or mT5, fused or not."""
    return isinstance(getattr(model, "encoder", None), T5Stack | MT5Stack)


def _exchange(model: nn.Module, patch: Patch, kinds: dict[type[nn.Module], type[nn.Module]]) -> int:
    count = 0
    if patch == "head" and not has_t5_stacks(model):
        return 0
    for name, module in model.named_modules():
        # Exactly that type: a subclass may compute something else.
        if type(module) in kinds and (patch != "head" or name == "lm_head"):
            module.__class__ = kinds[type(module)]
            count += 1
    return count
