"""How long a row takes, as far as the ladder's choice depends on it: reckoned, not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.cards import REFERENCE, memory_bandwidth, peak_flops
from jobs.plan import EXPECTED_SHARE
from worker.training.network.flops import Flops

LAUNCHES = 66
"""Kernels that a micro-batch starts for each layer: 3,155 for the 48 of FLAN-T5-XL (docs/measurements.md)."""
LAUNCH_S = 6e-6
"""Of one, issued by Python ahead of the card: a typical figure, not measured here."""


@dataclass(frozen=True)
class RowTime:
    """Seconds of rows of one shape, the longest there is. The optimizer's step is not in it.

    Arithmetic: FLOPs of the longest shape at `EXPECTED_SHARE` of the card's peak, recomputation counted as work. Each
    micro-batch besides: its weights are read twice and its gradients read and written once, at the bandwidth of the
    card's memory, and its kernels are launched. An unknown card, and a CPU, are reckoned as the reference card: it is
    only the ratios that count.
    """

    config: Mapping[str, Any]
    inputs: int
    targets: int
    parameter_bytes: int
    card: str | None

    def seconds(self, rows: int, recompute_layers: int) -> float:
        """Of one row in micro-batches of so many."""
        shape = np.array([self.inputs]), np.array([self.targets])
        flops = Flops.of_config(self.config).rows(*shape)
        if recompute_layers:
            flops += Flops.recomputed(self.config, recompute_layers).forward(*shape)
        peak, bandwidth = (
            (self.card and known(self.card)) or known(REFERENCE.name) for known in (peak_flops, memory_bandwidth)
        )
        assert peak and bandwidth, "the reference card is known"
        return (
            flops / (EXPECTED_SHARE * peak)
            + (4 * self.parameter_bytes / bandwidth + LAUNCHES * self._layers * LAUNCH_S) / rows
        )

    @property
    def _layers(self) -> int:
        encoders = int(self.config.get("num_layers", 6))
        return encoders + int(self.config.get("num_decoder_layers") or encoders)
