"""Writing safetensors files one tensor at a time, durably, with their sha256.

The library's own `save_file` first makes a copy of everything in host memory: 34 GB for the states of a 3 B model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from worker.training.models.manifest import SealedFile

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint8: "U8",
}
PIECE = 2**26


class WriteProgress(Protocol):
    """What is notified of progress."""

    def progress(self) -> None:
        """Something was."""


def write_tensors(file: Path, named: Mapping[str, torch.Tensor], progress: WriteProgress | None = None) -> SealedFile:
    """Write a safetensors file and fsync it; returns its `bytes` and `sha256`. WriteProgress is notified per tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in named.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return _write(file, _pieces(text, named, progress))


def write_bytes(file: Path, content: bytes) -> SealedFile:
    """Write and fsync any file; returns its `bytes` and `sha256`."""
    return _write(file, iter([memoryview(content)]))


def _pieces(header: bytes, named: Mapping[str, torch.Tensor], progress: WriteProgress | None) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in named.values():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), PIECE):
            yield flat[start : start + PIECE].cpu().numpy().data
        if progress is not None:
            progress.progress()


def _write(file: Path, pieces: Iterator[memoryview]) -> SealedFile:
    digest, size = hashlib.sha256(), 0
    with open(file, "wb") as handle:
        for piece in pieces:
            digest.update(piece)
            handle.write(piece)
            size += piece.nbytes
        handle.flush()
        os.fsync(handle.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}
