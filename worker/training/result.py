"""What a job leaves in `model/`: the trained weights, what opens them, and a page about them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.attempt import TrainResult
from jobs.errors import DiskFull
from jobs.text.units import bytes_alike
from worker.training.adapters.method import Method
from worker.training.checkpoints.checkpoint import WEIGHTS, VerifiedCheckpoint, restore_weights
from worker.training.checkpoints.tensorfile import write_tensors
from worker.training.context import TrainingContext
from worker.training.merge_check import check_merged
from worker.training.models.manifest import SealedFile, read_manifest
from worker.training.network.model import write_model
from worker.training.readme import base_model, generation_config, readme
from worker.training.trained import ADAPTER_FOLDER

Parts = Mapping[str, tuple[Method, Callable[[Path], SealedFile]]]


def write_result(context: TrainingContext, kept: VerifiedCheckpoint | None, result: TrainResult) -> None:
    """Write the weights of `kept`, or None: those in memory. `result` is what is known of them.

    Raises BaseChanged where weights have changed that are not trained, and DiskFull.
    """
    run, loaded = context.run, context.loaded
    loaded.check_untrained()
    free, needed = shutil.disk_usage(run.path).free, int(1.1 * loaded.result_bytes)
    if free < needed:
        model, room = bytes_alike(needed, free)
        raise DiskFull(
            f"the final model needs {model}, and {room} are free",
            hint="make room in the runs directory",
        )
    method, merged = loaded.method, loaded.method.merged

    def write_trained(file: Path) -> SealedFile:
        if kept is not None:
            shutil.copyfile(kept.folder / WEIGHTS, file)
            return read_manifest(kept.folder)[WEIGHTS]
        return write_tensors(file, loaded.weights, context.journal)

    def write(parts: Parts, delivered: Method, remark: str | None = None) -> None:
        write_model(
            loaded,
            run.model,
            parts,
            fence=context.journal.fence,
            base=base_model(context.plan),
            generation=generation_config(context),
            readme=readme(context, delivered, result, remark),
        )

    write({".": (method, write_trained)}, method)
    if merged is not None:  # only now: where the check refuses them, the adapters are there
        if kept is not None:
            restore_weights(kept.folder / WEIGHTS, loaded.weights)
        remark = check_merged(loaded, context.data, context.journal, context.cache).text

        def write_merged(file: Path) -> SealedFile:
            return write_tensors(file, merged.weights(loaded.model), context.journal)

        write({".": (merged, write_merged), ADAPTER_FOLDER: (method, write_trained)}, merged, remark)
