"""FLOPs that a seq2seq model needs for rows of given lengths: of its matrix products, two for each multiplication.

An [m, k] x [k, n] product is 2·m·n·k. Attention scores and values count for every pair of positions, in the decoder
also for those that the causal mask hides: the kernels that take a position bias skip none. Backward is twice forward.
Softmax, norms, activations, optimizer and padding are not counted: the figure is what the model needs, not what was
spent, so MFU (of it) is the same question for every implementation. What recomputation repeats is reported apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.training.tasks.flops import TokenFlops
from worker.training.tasks.seq2seq.layout import layout_of

_BLOCK = re.compile(r"\b(encoder|decoder)\.(?:block|layers)\.(\d+)\.")
_CROSS = re.compile(r"\.(?:EncDecAttention|encoder_attn)\.")
_QUERY = re.compile(r"\.(?:q|q_proj)\.weight$")
_OF_ENCODED = re.compile(r"\.(?:k|v|k_proj|v_proj)\.weight$")


@dataclass(frozen=True)
class PairFlops(TokenFlops):
    """Of an encoder and a decoder."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> PairFlops:
        """Of a whole model: gated or not, head tied or not. Raises Rejected (`bad_config`)."""
        layout = layout_of(config)
        head = layout.shapes[layout.embedding if layout.tied else layout.head]
        blocks = {name: shape for name, shape in layout.shapes.items() if _block(name) is not None}
        return cls._from_blocks(blocks, float(2 * head[0] * head[1]))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> PairFlops:
        """Of the blocks whose activations are recomputed: every n-th of both stacks, counted through; 0: none."""
        shapes = layout_of(config).shapes
        blocks = {block for name in shapes if (block := _block(name)) is not None}
        encoders = sum(stack == "encoder" for stack, _ in blocks)

        def chosen(name: str) -> bool:
            block = _block(name)
            if block is None or not every:
                return False
            return (block[1] if block[0] == "encoder" else encoders + block[1]) % every == 0

        return cls._from_blocks({name: shape for name, shape in shapes.items() if chosen(name)}, 0.0)

    @classmethod
    def _from_blocks(cls, shapes: Mapping[str, tuple[int, ...]], head: float) -> PairFlops:
        per_input, per_target, pairs = 0.0, head, {"encoder": 0.0, "cross": 0.0, "decoder": 0.0}
        for name, shape in shapes.items():
            if len(shape) != 2 or "relative_attention_bias" in name:
                continue  # norms and the table of position biases are no matrix products
            block = _block(name)
            assert block is not None
            # Keys and values of the cross-attention are made of what the encoder says.
            if block[0] == "encoder" or (_CROSS.search(name) and _OF_ENCODED.search(name)):
                per_input += 2 * shape[0] * shape[1]
            else:
                per_target += 2 * shape[0] * shape[1]
            if _QUERY.search(name):
                kind = "cross" if _CROSS.search(name) else block[0]
                pairs[kind] += 4 * shape[0]  # scores and values, 2 each, over all heads
        return cls(per_input, per_target, pairs["encoder"], pairs["cross"], pairs["decoder"])


def _block(name: str) -> tuple[str, int] | None:
    """The stack, and the number in it."""
    found = _BLOCK.search(name)
    return (found[1], int(found[2])) if found else None
