"""What a step takes of each GPU where several divide the weights of a model among themselves (ADR 20)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from worker.training.planning.prediction import ModelSize, Prediction, Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape


class DividedPredictor:
    """Predictions of the rank that holds most: in place of all divided weights it has its own, and two slots."""

    def __init__(self, predictor: Predictor, ranks: int) -> None:
        self._predictor = predictor
        self.divided_bytes, held = predictor.division(ranks)
        """Of weights that ranks divide; 0: those of this model they cannot."""
        self._less = self.divided_bytes - held

    @property
    def size(self) -> ModelSize:
        """Of what one GPU has."""
        size = self._predictor.size
        return replace(size, parameter_bytes=size.parameter_bytes - self._less)

    def predict(self, shape: MicroBatchShape, setting: Setting, *, padded: bool = True) -> Prediction:
        """See `Predictor`."""
        return self._divided(self._predictor.predict(shape, setting, padded=padded))

    def most_rows(
        self, inputs: int, targets: int, setting: Setting, limit_bytes: int, cap: int
    ) -> tuple[int, Prediction]:
        """See `Predictor`."""
        rows, found = self._predictor.most_rows(inputs, targets, setting, limit_bytes + self._less, cap)
        return rows, self._divided(found)

    def uncompiled(self, activation_checkpointing: int) -> str | None:
        """See `Predictor`."""
        return "GPUs that divide the weights among themselves run layers as they are"

    def keep(self) -> None:
        """See `Predictor`."""
        self._predictor.keep()

    def _divided(self, whole: Prediction) -> Prediction:
        parts: Mapping[str, int] = whole.parts
        return replace(
            whole,
            parts={**parts, "weights": parts["weights"] - self._less},
            peak=whole.peak - self._less,
            pass_peak=whole.pass_peak - self._less,
            evaluation_peak=whole.evaluation_peak - self._less,
            update_peak=whole.update_peak - self._less,
        )
