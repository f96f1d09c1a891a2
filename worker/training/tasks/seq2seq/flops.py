"""FLOPs that a T5 needs for rows of given lengths: of its matrix products, a multiplication and an addition each one.

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
from worker.training.tasks.seq2seq.layout import EMBEDDING, HEAD, t5_shapes


@dataclass(frozen=True)
class PairFlops(TokenFlops):
    """Of a T5."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> PairFlops:
        """Of a whole T5: gated or not, head tied or not. Raises Rejected (`bad_config`)."""
        shapes = t5_shapes(config)
        head = shapes[HEAD if HEAD in shapes else EMBEDDING]
        blocks = {name: shape for name, shape in shapes.items() if _block(name) is not None}
        return cls._from_blocks(blocks, float(2 * head[0] * head[1]))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> PairFlops:
        """Of the blocks whose activations are recomputed: every n-th of both stacks, counted through; 0: none."""
        shapes = t5_shapes(config)
        encoders = len({_block(name) for name in shapes if name.startswith("encoder.block.")})

        def chosen(name: str) -> bool:
            block = _block(name)
            if block is None or not every:
                return False
            return (block if name.startswith("encoder.") else encoders + block) % every == 0

        return cls._from_blocks({name: shape for name, shape in shapes.items() if chosen(name)}, 0.0)

    @classmethod
    def _from_blocks(cls, shapes: Mapping[str, tuple[int, ...]], head: float) -> PairFlops:
        per_input, per_target, pairs = 0.0, head, {"encoder": 0.0, "cross": 0.0, "decoder": 0.0}
        for name, shape in shapes.items():
            if len(shape) != 2 or "relative_attention_bias" in name:
                continue  # norms and the table of position biases are no matrix products
            # Keys and values of the cross-attention are made of what the encoder says.
            if name.startswith("encoder.") or "EncDecAttention.k" in name or "EncDecAttention.v" in name:
                per_input += 2 * shape[0] * shape[1]
            else:
                per_target += 2 * shape[0] * shape[1]
            if name.endswith("Attention.q.weight"):
                kind = "cross" if "EncDecAttention" in name else name.partition(".")[0]
                pairs[kind] += 4 * shape[0]  # scores and values, 2 each, over all heads
        return cls(per_input, per_target, pairs["encoder"], pairs["cross"], pairs["decoder"])


def layers(config: Mapping[str, Any]) -> int:
    """Of both stacks."""
    encoders = int(config.get("num_layers", 6))
    return encoders + int(config.get("num_decoder_layers") or encoders)


def _block(name: str) -> int | None:
    found = re.match(r"(?:encoder|decoder)\.block\.(\d+)\.", name)
    return int(found[1]) if found else None
