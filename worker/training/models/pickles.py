"""pytorch_model.bin, read as a safetensors file is: which tensors there are, and where their bytes lie.

A pickle is a program. Torch's unpickler for weights runs none of it but what makes tensors; here it makes tensors
without data (device "meta"), so neither code nor a weight is loaded. Their bytes lie in the file as they are, both in
the zip archives of today and in the files of torch before 1.6.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.errors import Rejected
from worker.training.models.headers import Stored

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_PROGRAM = re.compile(r"GLOBAL|reduce for|instantiate")
"""In what torch says of a pickle that asks for more than tensors."""


def read_pickle(file: Path, source: str) -> dict[str, Stored]:
    """All tensors of a file that torch.save wrote. A tensor that is shared lies in one place under several names.

    Raises Rejected: `unsafe_pickle` where it asks for more than tensors, `big_endian_pickle` where its numbers are
    not little-endian, `bad_pickle` where it cannot be read. PermissionError is left as it is.
    """
    try:
        return _stored(*(_read_archive if zipfile.is_zipfile(file) else _read_before_1_6)(file, source), file)
    except (PermissionError, MemoryError, Rejected):
        raise
    except Exception as error:  # what a damaged file makes torch raise, it does not say
        lines = [line.strip() for line in str(error).splitlines()]
        # The rest of torch's message tells how to run the program all the same.
        asked = next((line for line in lines if _PROGRAM.search(line)), None)
        if isinstance(error, pickle.UnpicklingError) and asked is not None:
            raise Rejected(
                f"model: {source}: {file.name} holds more than tensors, and pickles can run code: {asked[:200]}",
                code="unsafe_pickle",
                param="model",
                hint="take a file of the weights alone; on the hub, look for a revision with safetensors",
            ) from None
        reason = next((line for line in lines if "Unsupported operand" in line), [*lines, ""][0])
        raise Rejected(
            f"model: {source}: {file.name} cannot be read: {reason[:300]}",
            code="bad_pickle",
            param="model",
            hint="copy it again, completely, or save the model with save_pretrained, which writes safetensors",
        ) from None


def _stored(content: object, ends: Mapping[int, int], file: Path) -> dict[str, Stored]:
    """`ends`: the first byte behind each storage, by its first byte."""
    import torch

    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    found: dict[str, Stored] = {}
    size = file.stat().st_size
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"{name} is a {tensor.dtype} of another layout than files of models have")
        storage: Any = tensor.untyped_storage()
        begin = storage._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
        stored = Stored(file, dtype, tuple(tensor.shape), begin, begin + tensor.numel() * tensor.element_size())
        if stored.end > size:
            raise ValueError(f"{size} bytes long instead of {stored.end}")
        if stored.end > ends[storage._checkpoint_offset]:
            raise ValueError(f"{name} is longer than the data stored for it")
        found[str(name)] = stored
    return found


def _read_archive(file: Path, source: str) -> tuple[object, dict[int, int]]:
    """A zip archive of records: a pickle, the order of bytes (not in old files), each storage."""
    import torch

    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed")
    reader: Any = torch._C.PyTorchFileReader(str(file))
    order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
    if order != b"little":  # torch would swap bytes that are not there
        raise Rejected(
            f"model: {source}: the byte order of {file.name} is {order.decode(errors='replace')[:20]!r}, not 'little'",
            code="big_endian_pickle",
            param="model",
            hint=f"write it again with torch, on a machine with an x86 or ARM processor: torch.save(torch.load("
            f"{file.name!r}, weights_only=True), {file.name!r})",
        )
    sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
    begins = {name: reader.get_record_offset(name) for name in sizes if name.startswith("data/")}
    content: object = torch.load(file, map_location="meta", weights_only=True)
    return content, {begin: begin + sizes[name] for name, begin in begins.items()}


def _read_before_1_6(file: Path, source: str) -> tuple[object, dict[int, int]]:
    """Pickles, one behind the other, then the bytes of each storage behind their number."""
    import torch
    from torch import _weights_only_unpickler
    from torch.serialization import MAGIC_NUMBER

    storages: dict[str, torch.storage.TypedStorage] = {}
    sizes: dict[str, int] = {}  # those of the storages grow with the tensors that are made of them
    ends: dict[int, int] = {}

    def storage_of(saved: tuple[Any, ...]) -> Any:
        kind, storage_type, key, _, elements, view = saved
        if kind not in ("storage", b"storage") or view is not None:
            raise pickle.UnpicklingError(f"Unsupported storage {kind!r}")
        if key not in storages:
            each: int = torch.empty(0, dtype=storage_type.dtype).element_size()
            sizes[key] = elements * each
            data = torch.UntypedStorage(sizes[key], device="meta")
            storages[key] = torch.storage.TypedStorage(wrap_storage=data, dtype=storage_type.dtype, _internal=True)
        return storages[key]

    with open(file, "rb") as handle:
        if _weights_only_unpickler.load(handle) != MAGIC_NUMBER:
            raise ValueError("it is no file of torch.save")
        for _ in ("protocol", "machine"):
            _weights_only_unpickler.load(handle)
        unpickler: Any = _weights_only_unpickler.Unpickler(handle)
        unpickler.persistent_load = storage_of
        content: object = unpickler.load()
        keys: Any = _weights_only_unpickler.load(handle)
        at = handle.tell()
        for key in keys:
            data = storages[key]._untyped_storage
            data._checkpoint_offset = at + 8  # behind the number of its elements
            at = ends[data._checkpoint_offset] = data._checkpoint_offset + sizes[key]
    return content, ends
