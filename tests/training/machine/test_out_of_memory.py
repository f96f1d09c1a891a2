"""What an out-of-memory error looks like, what it says, and why it came."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import torch

from jobs.text.units import GIB
from jobs.trainer_facts import GpuProcess
from worker.training.machine.out_of_memory import (
    LIBRARY_BYTES,
    Figures,
    MemoryShortage,
    is_out_of_memory,
    requested_bytes,
)
from worker.training.machine.process_monitor import OtherProcessesUse

TORCH = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.36 GiB of which 1.20 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "123456 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(TORCH),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/CUDACachingAllocator.cpp":1407, please report'
        ),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\nCuda failure 2 'out of memory'"),
        RuntimeError("NCCL WARN Failed to CUDA calloc 10485760 bytes"),
        RuntimeError(CPU),
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("unable to mmap 4096 bytes: Cannot allocate memory (12)"),
        RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."),
        MemoryError(),
        MemoryError("Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type int64"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_every_form_is_known(error: BaseException) -> None:
    assert is_out_of_memory(error)
    found = MemoryShortage.of(error, torch.device("cpu"))
    assert found is not None and found.cause == "exhausted"
    assert found.message and "\n" not in found.message
    assert found.figures.allocated is not None and found.figures.allocated > 0


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory"),
        RuntimeError("index out of range in self"),
        RuntimeError("the disk quota is out of memory blocks"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: unhandled cuda error, an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle)`"),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "c10/cuda/PeerToPeerAccess.cpp":83, please report'),
        RuntimeError("could not create a primitive descriptor for a matmul primitive"),
        RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x3 and 4x4)"),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_nothing_else_is_taken_for_it(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    assert MemoryShortage.of(error, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (TORCH, 2 * GIB),
        ("CUDA out of memory. Tried to allocate 20.50 MiB.", int(20.5 * 2**20)),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        (CPU, 123456),
        ("Unable to allocate 128. KiB for an array", 128 * 1024),
        ("CUDA error: out of memory", None),
    ],
)
def test_what_was_asked_for_is_read_from_the_message(text: str, size: int | None) -> None:
    assert requested_bytes(text) == size


def test_the_line_that_says_it_is_the_message_and_the_traceback_is_text() -> None:
    try:
        raise RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB.")
    except RuntimeError as error:
        found = MemoryShortage.of(error, torch.device("cpu"))
    assert found is not None
    assert found.message == "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB."
    assert "test_out_of_memory.py" in "".join(found.trace)
    assert found.text.startswith(found.message + " (") and " resident, " in found.text


ON_A_GPU = MemoryShortage(message="m", requested=2 * GIB, figures=Figures(20 * GIB, 21 * GIB, GIB), device="cuda")


@pytest.mark.parametrize(
    ("now", "requested", "others", "cause"),
    [
        (Figures(20 * GIB, 21 * GIB, GIB), 2 * GIB, 6 * GIB, "other_processes"),
        (Figures(20 * GIB, 21 * GIB, GIB), 2 * GIB, GIB, "other_processes"),  # all that is missing
        (Figures(20 * GIB, 21 * GIB, GIB), 2 * GIB, GIB // 2, "exhausted"),  # without them it would not do either
        (Figures(20 * GIB, 21 * GIB, GIB), 2 * GIB, 0, "exhausted"),
        (Figures(20 * GIB, 21 * GIB, GIB), 2 * GIB, None, "exhausted"),
        (Figures(20 * GIB, 22 * GIB, GIB), 2 * GIB, 0, "fragmentation"),
        (Figures(20 * GIB, 22 * GIB, GIB), 2 * GIB, 6 * GIB, "other_processes"),
        # The GPU has room, so it is our own limit that is reached, whatever others hold.
        (Figures(20 * GIB, 21 * GIB, 8 * GIB), 2 * GIB, 6 * GIB, "exhausted"),
        (Figures(20 * GIB, 23 * GIB, 8 * GIB), 2 * GIB, 6 * GIB, "fragmentation"),
        # The GPU is full, too, as it is beside other trials.
        (Figures(20 * GIB, 21 * GIB, GIB, room=2 * GIB - 1), 2 * GIB, 6 * GIB, "exhausted"),
        (Figures(20 * GIB, 21 * GIB, GIB, room=2 * GIB), 2 * GIB, 6 * GIB, "other_processes"),
        # A library does not say what it wanted.
        (Figures(20 * GIB, 20 * GIB + LIBRARY_BYTES, 0), None, 0, "fragmentation"),
        (Figures(20 * GIB, 20 * GIB + LIBRARY_BYTES - 1, 0), None, 0, "exhausted"),
        (Figures(20 * GIB, 20 * GIB, 0), None, LIBRARY_BYTES, "other_processes"),
        (Figures(), 2 * GIB, None, "exhausted"),
    ],
)
def test_why_it_came(now: Figures, requested: int | None, others: int | None, cause: str) -> None:
    shortage = replace(ON_A_GPU, figures=now, requested=requested)
    other_processes = None if others is None else OtherProcessesUse(others)
    assert shortage.beside(other_processes).cause == cause
    assert replace(shortage, device="cpu").beside(other_processes).cause == "exhausted", (
        "on a CPU nothing else is known"
    )


def test_others_are_named() -> None:
    other_processes = OtherProcessesUse(6 * GIB, (GpuProcess(pid=4711, name="python3", memory_bytes=6 * GIB),))
    assert ON_A_GPU.beside(other_processes).text == (
        "m (20.0 GiB allocated, 21.0 GiB reserved, 1.0 GiB free; others hold 6.0 GiB by python3 (pid 4711))"
    )
    assert "others" not in ON_A_GPU.beside(OtherProcessesUse(0)).text
