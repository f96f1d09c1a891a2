"""FLOPs of a causal model for rows of given lengths: of its matrix products, a multiplication and an addition each one.

An [m, k] x [k, n] product is 2·m·n·k. Of attention scores and values only those count that the causal mask leaves: half
of all pairs of positions. The head counts for the tokens that are learned, for which alone it is computed. Backward is
twice forward. Embedding, softmax, norms, activations, optimizer and padding are not counted (see the FLOPs of T5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.training.tasks.causal.layout import layers_of, layout_of
from worker.training.tasks.flops import TokenFlops, of_matrices, width_of


@dataclass(frozen=True)
class CausalFlops(TokenFlops):
    """`input` are the tokens of a row, `target` those of them that are learned."""

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> CausalFlops:
        """Of a whole model. Raises Rejected (`bad_config`)."""
        layout = layout_of(config)
        head = layout.shapes[layout.embedding if layout.tied else layout.head]
        return cls._of_layers(config, 1, float(2 * head[0] * head[1]))

    @classmethod
    def recomputed(cls, config: Mapping[str, Any], every: int) -> CausalFlops:
        """Of the layers whose activations are recomputed: every n-th; 0: none."""
        return cls._of_layers(config, every, 0.0) if every else cls(0.0, 0.0)

    @classmethod
    def _of_layers(cls, config: Mapping[str, Any], every: int, head: float) -> CausalFlops:
        """Of the matrices in every n-th layer."""
        per_input = of_matrices(layout_of(config).shapes, every)
        layers = -(-layers_of(config) // every)
        return cls(per_input, head, input_pairs=2.0 * _attention_width(config) * layers)


def _attention_width(config: Mapping[str, Any]) -> int:
    """Numbers of a position in all heads of a layer's attention."""
    heads, each = config.get("num_attention_heads"), config.get("head_dim")
    return int(heads) * int(each) if heads and each else width_of(config)
