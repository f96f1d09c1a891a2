"""What a step takes of each GPU where several shard the weights of a model among themselves (ADR 20)."""

from __future__ import annotations

from worker.training.planning.prediction import ModelSize, Prediction, Setting
from worker.training.planning.predictor import Predictor
from worker.training.steps.shape import MicroBatchShape


class ShardedPredictor:
    """Predictions of the rank that has most."""

    def __init__(self, predictor: Predictor, ranks: int) -> None:
        self._predictor = predictor
        self._share = predictor.share(ranks)

    @property
    def sharded_bytes(self) -> int:
        """Of weights that ranks shard; 0: those of this model they cannot."""
        return self._share.sharded_bytes

    @property
    def size(self) -> ModelSize:
        """Of what one GPU has."""
        return self._share.size(self._predictor.size)

    def predict(self, shape: MicroBatchShape, setting: Setting, *, padded: bool = True) -> Prediction:
        """See `Predictor`."""
        return self._predictor.predict(shape, setting, padded=padded, share=self._share)

    def most_rows(
        self, inputs: int, targets: int, setting: Setting, limit_bytes: int, cap: int
    ) -> tuple[int, Prediction]:
        """See `Predictor`."""
        return self._predictor.most_rows(inputs, targets, setting, limit_bytes, cap, share=self._share)

    def uncompiled(self, activation_checkpointing: int) -> str | None:
        """See `Predictor`."""
        return "GPUs that shard the weights run layers as they are"

    def keep(self) -> None:
        """See `Predictor`."""
        self._predictor.keep()
