"""Writing checkpoints: beside the training, from a copy on the host, one at a time (ADR 0004).

    checkpoints/step-00000500/  model.safetensors  optimizer.safetensors  state.json  manifest.json

Written as `tmp-…`, every file fsynced, the manifest (bytes and sha256 of each) last, then renamed. What is called
`step-…` was complete; that it still is, is verified before it is used (checkpoint.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import torch

from jobs.disk.files import sync_folder
from jobs.disk.rundir import RunDir
from jobs.evaluation_metrics import EvaluationMetric, cost_of
from jobs.spec import CheckpointSpec
from jobs.trainer_facts import CheckpointSaved, DiskLow
from worker.training.checkpoints.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    TrainState,
    best_first,
    cost_in,
    folder_of,
    newest_first,
)
from worker.training.checkpoints.pruning import REPLACED, move_away, prune
from worker.training.checkpoints.tensorfile import WriteProgress, write_bytes, write_tensors
from worker.training.journal import Journal, unfenced
from worker.training.machine.host import host_memory
from worker.training.optimizers.optimizer import Optimizer
from worker.training.steps.randomness import rng_states

Tensors = Mapping[str, Mapping[str, torch.Tensor]]
"""File name → name → tensor."""
LOOK_S = 1.0
SPARE = 2 * 2**30
"""Bytes of host memory that copies must leave free."""
log = logging.getLogger("longhaul.trainer")


class Saver:
    """Saves the trained weights of one model, and its optimizer.

    `copies`: in the background; None: if the host has room for them.

    Only the trainer's one thread may call it. What became of a save is noted in the journal by the next `poll`.
    """

    def __init__(
        self,
        run: RunDir,
        weights: Mapping[str, torch.Tensor],
        optimizer: Optimizer,
        spec: CheckpointSpec,
        journal: Journal,
        *,
        copies: bool | None = None,
    ) -> None:
        self._run, self._spec, self._journal = run, spec, journal
        self._weights, self._optimizer = weights, optimizer
        self._copies = copies
        self._buffers: dict[str, dict[str, torch.Tensor]] | None = None
        self._writer: _Writer | None = None

    def save(self, state: TrainState) -> None:
        """Save the weights and states as they are now. Waits for the save before, if that is still being written."""
        self.wait()
        self._journal.phase("save", step=state.step)
        state = state.model_copy(update={"rng": rng_states()}, deep=True)
        live = {WEIGHTS: self._weights, OPTIMIZER: self._optimizer.state_dict()}
        if (low := too_little_room(self._run, state.step, live)) is not None:
            self._journal.note(low)
            return
        if self.reserve(live):
            assert self._buffers is not None, "they are made first"
            copy_tensors(live, self._buffers)
            self._writer = _Writer(self._run, state, self._buffers, self._spec, self._journal.fence)
            self._writer.start()
        else:
            self._journal.note(write(self._run, state, live, self._spec, self._journal, self._journal.fence))

    def best_cost(self) -> float | None:
        """Of the best checkpoint that is there, or is being written, by `checkpoint.best`; None: there is none."""
        if (metric := self._spec.best) is None:
            return None
        costs = [*best_first(newest_first(self._run), metric).values()][:1]
        if self._writer is not None and (written := self._writer.cost(metric)) is not None:
            costs.append(written)
        return min(costs, default=None)

    def reserve(self, live: Tensors) -> bool:
        """Make the buffers for copies, unless they are there. Whether there are any; else checkpoints are streamed."""
        if self._copies is None:
            self._copies = has_room_for_copies(live)
        if self._copies and self._buffers is None:
            self._buffers = make_buffers(live)
            self._copies = self._buffers is not None
        return self._copies

    def poll(self) -> None:
        """Note what became of a save that has ended. Raises what its thread raised."""
        if self._writer is not None and not self._writer.is_alive():
            writer, self._writer = self._writer, None
            if writer.error is not None:
                raise writer.error
            assert writer.outcome is not None, "it ended one way or the other"
            self._journal.note(writer.outcome)

    def wait(self) -> None:
        """Wait for the save that is being written, if there is one."""
        if self._writer is None:
            return
        self._journal.phase("save")
        seen = -1
        while self._writer.is_alive():
            self._writer.join(LOOK_S)
            if self._writer.tensors != seen:
                seen = self._writer.tensors
                self._journal.progress()
        self.poll()


class _Writer(threading.Thread):
    """Writes one checkpoint from copies. Not a daemon: a trainer that ends by an error still completes a good save."""

    def __init__(
        self, run: RunDir, state: TrainState, copies: Tensors, spec: CheckpointSpec, fence: Callable[[], None]
    ) -> None:
        super().__init__(name=f"save-{state.step}")
        self._run, self._state, self._tensors, self._spec, self._fence = run, state, copies, spec, fence
        self._copied = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None
        self.tensors = 0
        self.outcome: CheckpointSaved | DiskLow | None = None
        self.error: BaseException | None = None

    def cost(self, metric: str) -> float | None:
        """Of what it writes, by this metric."""
        return cost_of(metric, self._state.validation_loss, self._state.metrics)

    def run(self) -> None:
        """Until it is written, or known why not."""
        try:
            if self._copied is not None:
                self._copied.synchronize()
            self.outcome = write(self._run, self._state, self._tensors, self._spec, self, self._fence)
        except BaseException as error:  # raised again by `poll`, in the trainer's own thread
            self.error = error

    def progress(self) -> None:
        """One tensor more."""
        self.tensors += 1


def write(
    run: RunDir, state: TrainState, tensors: Tensors, spec: CheckpointSpec, progress: WriteProgress,
    fence: Callable[[], None] = unfenced,
) -> CheckpointSaved | DiskLow:  # fmt: skip
    """Write `checkpoints/step-…`, then prune. DiskLow, and nothing is left behind, when the disk fills up meanwhile.

    `fence` is that of the attempt (`Journal.fence`): what a later one writes there is not touched.
    """
    start = time.perf_counter()
    fence()
    final = folder_of(run, state.step)
    temporary = final.with_name(f"tmp-{final.name}-{uuid.uuid4().hex[:8]}")  # no other attempt writes in it
    run.checkpoints.mkdir(exist_ok=True)
    temporary.mkdir()
    try:
        manifest = {}
        for file, named in tensors.items():
            fence()
            manifest[file] = write_tensors(temporary / file, named, progress)
        fence()
        manifest[STATE] = write_bytes(temporary / STATE, state.model_dump_json(indent=1).encode())
        write_bytes(temporary / MANIFEST, json.dumps({"step": state.step, "files": manifest}, indent=1).encode())
        sync_folder(temporary)
    except OSError as error:
        fence()
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(run.checkpoints).free
        return DiskLow(step=state.step, free_bytes=free, needed_bytes=bytes_needed(tensors))
    fence()
    replaced = move_away(final, REPLACED)  # saved because of a stop, before its evaluation
    os.rename(temporary, final)
    sync_folder(run.checkpoints)
    if replaced is not None:
        shutil.rmtree(replaced)
    fence()
    prune(run, spec.keep, spec.best or EvaluationMetric.LOSS)
    return CheckpointSaved(
        step=state.step,
        path=str(final.relative_to(run.path)),
        bytes=sum(int(entry["bytes"]) for entry in manifest.values()),
        seconds=time.perf_counter() - start,
        validation_loss=state.validation_loss,
    )


def bytes_needed(tensors: Tensors) -> int:
    """Of a checkpoint, on disk, with a tenth to spare."""
    return int(1.1 * bytes_of(tensors))


def bytes_of(tensors: Tensors) -> int:
    """Of all of them."""
    return sum(tensor.nbytes for named in tensors.values() for tensor in named.values())


def has_room_for_copies(tensors: Tensors) -> bool:
    """Whether the host can hold them all a second time. Where a hard limit counts this process's memory: no."""
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        return False
    size = bytes_of(tensors)
    available = host_memory().available
    if size + SPARE > available:
        log.info("checkpoints are streamed: %d bytes of copies, %d available on the host", size, available)
        return False
    return True


def too_little_room(run: RunDir, step: int, tensors: Tensors) -> DiskLow | None:
    """Why a save is skipped; None: there is room."""
    run.checkpoints.mkdir(exist_ok=True)
    needed, free = bytes_needed(tensors), shutil.disk_usage(run.checkpoints).free
    return DiskLow(step=step, free_bytes=free, needed_bytes=needed) if free < needed else None


def is_saved(run: RunDir, state: TrainState) -> bool:
    """Whether the checkpoint of this step is there, with the validation loss if that is known by now."""
    folder = folder_of(run, state.step)
    return folder.exists() and cost_in(folder, EvaluationMetric.LOSS) == state.validation_loss


def make_buffers(tensors: Tensors) -> dict[str, dict[str, torch.Tensor]] | None:
    """Host memory for a copy of each, pinned if it is on a GPU. None, and a warning, where that cannot be had."""
    try:
        return {file: {name: _buffer(tensor) for name, tensor in named.items()} for file, named in tensors.items()}
    except RuntimeError as error:
        log.warning("checkpoints are streamed: there is no memory for copies: %s", str(error).splitlines()[0])
    if torch.cuda.is_initialized():
        torch.accelerator.empty_host_cache()  # what was pinned before it failed
    return None


def copy_tensors(live: Tensors, buffers: Tensors) -> None:
    """Copy each into its buffer: after what the GPU has to do already, before what comes then. The host continues."""
    for file, named in live.items():
        for name, tensor in named.items():
            buffers[file][name].copy_(tensor.detach(), non_blocking=True)


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(
        tensor, device="cpu", pin_memory=torch.cuda.is_initialized(), memory_format=torch.contiguous_format
    )
