"""What a job leaves in `model/`: the trained weights, what opens them, and a page about them."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs.errors import DiskFull
from jobs.text.units import bytes_alike
from worker.training.checkpoints.checkpoint import WEIGHTS, VerifiedCheckpoint
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.context import TrainingContext
from worker.training.network.model import write_model
from worker.training.readme import base_model, generation_config, readme


def write_result(context: TrainingContext, kept: VerifiedCheckpoint | None, *, step: int, loss: float | None) -> None:
    """Write the weights of `kept`, or None: those in memory, which are those after `step` with this validation loss.

    Raises BaseChanged where weights have changed that are not trained, and DiskFull.
    """
    run, loaded = context.run, context.loaded
    loaded.check_untrained()
    weights = loaded.weights
    free, needed = shutil.disk_usage(run.path).free, int(1.1 * sum(each.nbytes for each in weights.values()))
    if free < needed:
        model, room = bytes_alike(needed, free)
        raise DiskFull(
            f"the final model needs {model}, and {room} are free",
            hint="make room in the runs directory",
        )

    def write_weights(file: Path) -> object:
        if kept is not None:
            return shutil.copyfile(kept.folder / WEIGHTS, file)
        return write_tensors(file, weights, context.journal)

    write_model(
        loaded,
        run.model,
        write_weights,
        base=base_model(context.plan),
        generation=generation_config(context),
        readme=readme(context, step=step, loss=loss),
    )
