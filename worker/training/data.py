"""A prepared dataset: tokens of checked rows in flat files, memory-mapped; content-addressed and never changed.

A folder holds `input.tokens` and `target.tokens` (uint16, or uint32 for vocabularies above 65,536; end-of-sequence
included), `input.offsets` and `target.offsets` (int64, one more than rows), `train.rows` and `validation.rows` (int64
row numbers of the two parts), `rejected.jsonl` (what was set aside, and why) and `manifest.json`, written last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from jobs.errors import BadData

FORMAT = 1
"""Goes up whenever the same rows would be prepared differently."""
SIDES = ("input", "target")
PARTS = ("train", "validation")
MANIFEST = "manifest.json"
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class Rows:
    """Some rows of a prepared dataset, numbered from 0."""

    def __init__(self, folder: Path, part: str, dtype: str) -> None:
        self._numbers: Int64 = _read(folder / f"{part}.rows", "<i8")
        self._tokens: dict[str, Tokens] = {}
        self._starts: dict[str, Int64] = {}
        self._lengths: dict[str, Int32] = {}
        for side in SIDES:
            offsets = _read(folder / f"{side}.offsets", "<i8")
            self._tokens[side] = _map(folder / f"{side}.tokens", dtype)
            self._starts[side] = offsets[:-1][self._numbers]
            self._lengths[side] = np.diff(offsets)[self._numbers].astype(np.int32)

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def input_lengths(self) -> Int32:
        """[rows] tokens of each input, end-of-sequence included."""
        return self._lengths["input"]

    @property
    def target_lengths(self) -> Int32:
        """[rows] tokens of each target, end-of-sequence included."""
        return self._lengths["target"]

    def input(self, row: int) -> Tokens:
        """Tokens of one input."""
        return self._one("input", row)

    def target(self, row: int) -> Tokens:
        """Tokens of one target."""
        return self._one("target", row)

    def gather(self, side: str, chosen: Int64, width: int, fill: int) -> Int64:
        """[len(chosen), width] tokens of the chosen rows, `fill` behind their ends. `width` covers the longest."""
        lengths = self._lengths[side][chosen]
        assert lengths.max(initial=0) <= width
        columns = np.arange(width)
        real = columns < lengths[:, None]
        gathered = np.full(real.shape, fill, np.int64)
        gathered[real] = self._tokens[side][(self._starts[side][chosen][:, None] + columns)[real]]
        return gathered

    def _one(self, side: str, row: int) -> Tokens:
        start = int(self._starts[side][row])
        return self._tokens[side][start : start + int(self._lengths[side][row])]


class PreparedDataset:
    """Both parts of a prepared dataset, and its manifest."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.train = Rows(folder, "train", manifest["dtype"])
        self.validation = Rows(folder, "validation", manifest["dtype"])

    @classmethod
    def open(cls, folder: Path) -> PreparedDataset:
        """Open a folder. Raises BadData (`prepared_damaged`) unless every file is there in its full size."""
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            wrong = [
                f"{name} has {size} of {expected} bytes"
                for name, expected in manifest["files"].items()
                if (size := (folder / name).stat().st_size) != expected
            ]
        except (OSError, ValueError, KeyError) as error:
            wrong = [str(error)]
        if wrong:
            raise BadData(
                f"the prepared dataset {folder} is damaged: {wrong[0]}",
                code="prepared_damaged",
                hint="submit the job again: it is then prepared anew",
            )
        return cls(folder, manifest)


class Writer:
    """Writes the files of one prepared dataset into a folder that exists; call `finish` last."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self._folder = folder
        self._dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
        self._tokens: dict[str, IO[bytes]] = {side: open(folder / f"{side}.tokens", "wb") for side in SIDES}  # noqa: SIM115 - closed by __exit__
        self._lengths: dict[str, list[Int64]] = {side: [np.zeros(1, np.int64)] for side in SIDES}
        self.rows = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._tokens.values():
            file.close()

    def add(self, inputs: Sequence[npt.NDArray[np.uint32]], targets: Sequence[npt.NDArray[np.uint32]]) -> None:
        """Some more rows, at least one: the tokens of each."""
        for side, texts in zip(SIDES, (inputs, targets), strict=True):
            self._tokens[side].write(np.concatenate(texts).astype(self._dtype).tobytes())
            self._lengths[side].append(np.array([len(ids) for ids in texts], np.int64))
        self.rows += len(inputs)

    def finish(self, parts: dict[str, Int64], manifest: dict[str, Any]) -> None:
        """Write offsets, the row numbers of each part, and the manifest; all of it reaches the disk."""
        for side in SIDES:
            self._tokens[side].close()
            offsets = np.cumsum(np.concatenate(self._lengths[side]), dtype=np.int64)
            (self._folder / f"{side}.offsets").write_bytes(offsets.astype("<i8").tobytes())
        for part in PARTS:
            (self._folder / f"{part}.rows").write_bytes(parts[part].astype("<i8").tobytes())
        files = {file.name: file.stat().st_size for file in sorted(self._folder.iterdir())}
        content = {"format": FORMAT, "dtype": self._dtype.str, **manifest, "files": files}
        (self._folder / MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        for file in self._folder.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())


def _map(file: Path, dtype: str) -> Any:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)


def _read(file: Path, dtype: str) -> Any:
    return np.fromfile(file, dtype=dtype)
