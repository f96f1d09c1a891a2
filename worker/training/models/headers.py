"""Headers of safetensors files: which tensors there are, and where they lie. No tensor is loaded, no torch imported."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import Rejected

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER = 100 << 20  # the limit of the format
_PIECE = 1 << 20


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: its bytes are [begin, end) of `file`."""

    file: Path
    dtype: str
    """As the format writes it, such as BF16."""
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def place(self) -> tuple[str, int]:
        """Where it lies among others."""
        return self.file.name, self.begin

    def same_bytes(self, other: Stored) -> bool:
        """Whether both hold the same values. Reads up to the first difference."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        with open(self.file, "rb") as mine, open(other.file, "rb") as its:
            mine.seek(self.begin)
            its.seek(other.begin)
            left = self.end - self.begin
            while left:
                size = min(_PIECE, left)
                if mine.read(size) != its.read(size):
                    return False
                left -= size
        return True


def damaged(source: str, what: str) -> Rejected:
    """The error for weight files that cannot be what was saved."""
    return Rejected(f"model: {source}: {what}", code="bad_safetensors", param="model", hint="copy it again, completely")


def read_header(file: Path, source: str) -> dict[str, Stored]:
    """All tensors of a file. Raises Rejected (`bad_safetensors`) when it is not as long as its header says.

    PermissionError is left as it is.
    """
    try:
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > _MAX_HEADER:
                raise ValueError("no safetensors header")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        found: dict[str, Stored] = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            stored = Stored(file, entry["dtype"], tuple(entry["shape"]), start + begin, start + end)
            if end - begin != stored.elements * ITEM_BYTES[stored.dtype]:
                raise ValueError(f"{name} has {end - begin} bytes for {stored.shape} of {stored.dtype}")
            found[name] = stored
        expected = max((stored.end for stored in found.values()), default=start)
        if (size := file.stat().st_size) != expected:
            raise ValueError(f"{size} bytes long instead of {expected}")
        return found
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(source, f"{file.name} is damaged: {error}") from None
