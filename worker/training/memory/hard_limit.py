"""The budget as a hard limit of this process: what a job may not use, it does not get (ADR 0003).

It is there for a trial on a GPU, which gets what it reserves (ADR 0015), where the job sets `memory.budget`, or a test
sets LONGHAUL_TEST_MEMORY_LIMIT (bytes): what attempts of a train worker then really get, whatever was planned for
them. That variable is for tests alone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import resource
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from jobs.memory_plan import TEST_LIMIT
from jobs.spec import MemorySpec
from jobs.text.units import GIB
from worker.training.dataset.data import Rows
from worker.training.machine.usage import process_bytes
from worker.training.network.model import LoadedModel
from worker.training.optimizers.optimizer import Optimizer
from worker.training.planning.memory_plan import CONTEXT_BYTES

PARALLEL_ELEMENTS = 2**20
"""Work that torch shares among all its threads: it starts them then, each with a stack of its own."""

log = logging.getLogger("longhaul.trainer")


def limit_of(memory: MemorySpec, test_limit: int | None, reserved: int | None = None) -> int | None:
    """Bytes that the attempt gets; None: as much as there is. `reserved`: what it has of a GPU as a trial."""
    if test_limit is not None:
        log.warning("%s is set: this attempt gets %d bytes, whatever was planned", TEST_LIMIT, test_limit)
        return test_limit
    if reserved is not None:
        return reserved
    return None if memory.budget == "auto" else int(memory.budget * GIB)


@contextlib.contextmanager
def on_gpu(device: torch.device, limit: int | None) -> Iterator[None]:
    """Inside, torch's allocator takes no more of the GPU than `limit`, less what the CUDA context takes besides.

    Nothing is done on a CPU, or where `limit` is None. Use it before anything is loaded.
    """
    if device.type != "cuda" or limit is None:
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(gpu_fraction(limit, total))  # `cuda` without an index is refused here
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def gpu_fraction(limit: int, total: int) -> float:
    """Share of a GPU of `total` bytes, 0 to 1, that torch's allocator gets."""
    return min(1.0, max(0.0, (limit - CONTEXT_BYTES) / total))


@contextlib.contextmanager
def on_host(
    device: torch.device, limit: int | None, loaded: LoadedModel, optimizer: Optimizer, rows: Rows
) -> Iterator[None]:
    """Inside, tensors on the CPU take no more than `limit` bytes, weights and optimizer states among them.

    Nothing is done on a GPU, or where `limit` is None. Use it when everything is loaded.

    RLIMIT_DATA is a limit to the private writable memory of the process (VmData): tensors, but also the heaps of
    Python and of libraries, and 8 MiB for each thread's stack. A plan counts tensors. So one micro-batch is run first,
    to let the libraries take what they need, and the limit is what the process has then, less the tensors alive,
    plus what tensors may take. Weights are in VmData from the load on, although they are mapped from their file: the
    mapping is private and writable, and a page that is written to, and becomes memory of our own, changes nothing.
    """
    if device.type != "cpu" or limit is None:
        yield
        return
    warm_up(loaded, rows)
    used, alive = process_bytes("VmData"), tensor_bytes(loaded.model, optimizer)
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    log.info("tensors get %d bytes; weights and optimizer states take %d of them", limit, alive)
    resource.setrlimit(resource.RLIMIT_DATA, (used - alive + limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


def warm_up(loaded: LoadedModel, rows: Rows) -> None:
    """Forward and backward over the shortest row, on all threads; it leaves neither gradients nor traces in the RNG."""
    model = loaded.model
    training = model.training
    torch.ones(PARALLEL_ELEMENTS).add_(1)
    shortest = np.argmin(rows.input_lengths.astype(np.int64) + rows.target_lengths)
    [batch] = loaded.task.limit(rows, 1).batches(rows, [np.array([shortest])], loaded.pad_id)
    with torch.random.fork_rng(devices=[]):
        batch.loss_sum(model.train()).backward()
    model.zero_grad(set_to_none=True)
    model.train(training)
    gc.collect()


def tensor_bytes(model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Of weights, buffers and optimizer states; what shares memory counts once."""
    states: Mapping[str, torch.Tensor] = optimizer.state_dict()
    tensors = [*model.parameters(), *model.buffers(), *states.values()]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
