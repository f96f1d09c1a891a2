"""A prepared dataset: tokens of checked rows in flat files, memory-mapped; content-addressed and never changed.

A folder holds `input.tokens` and `target.tokens` (uint16, or uint32 for vocabularies above 65,536): what the model
reads, and what it learns of it, in numbers whose meaning is the task's (of seq2seq the tokens of both texts,
end-of-sequence included). Besides `input.offsets` and `target.offsets` (int64, one more than rows), `train.rows` and
`validation.rows` (int64 row numbers of the two parts), `whole_targets.jsonl` (row number and text of targets of which
the tokens have lost something: of the first 10,000 rows that evaluations take of those held out, or of all where none
are), `rejected.jsonl` (what was rejected, and why) and `manifest.json`, written last.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jobs.dataset_report import DatasetSummary
from jobs.disk.files import sync_folder, whole_lines
from jobs.errors import BadData
from jobs.frozen import Frozen
from worker.training.store import fingerprint

if TYPE_CHECKING:
    from jobs.dataset_report import DatasetSummary

# -- manifest ----------------------------------------------------------------------------------------------------------
# What lies in the folder of a prepared dataset: `manifest.json`, written last.


class PreparedFile(Frozen):
    """One file of the folder."""

    bytes: int
    sha256: str


class Manifest(Frozen):
    """manifest.json, written last."""

    format: int
    dtype: str
    """Of a token, as numpy writes it."""
    report: DatasetSummary
    ends: tuple[int, ...] = ()
    """Rows kept up to the end of each source. Earlier versions did not say."""
    files: dict[str, PreparedFile]


# -- data --------------------------------------------------------------------------------------------------------------

FORMAT = 12
"""Goes up whenever the same rows would be prepared differently."""
EARLIER_FORMAT = 11
"""Of the version before: jobs that have trained on rows in it go on with them."""
SIDES = ("input", "target")
PARTS = ("train", "validation")
MANIFEST = "manifest.json"
WHOLE_TARGETS = "whole_targets.jsonl"
WORK = "work."
"""Prefix of files that exist only while a dataset is made."""
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Type of the tokens of a vocabulary of this size."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


class Rows:
    """Some rows of a prepared dataset, numbered from 0."""

    def __init__(self, folder: Path, part: str, dtype: str) -> None:
        self._folder = folder
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

    def below(self, number: int) -> int:
        """How many of them are before this row of the whole dataset."""
        return int(np.searchsorted(self._numbers, number))

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

    def whole_targets(self, chosen: Collection[int]) -> dict[int, str]:
        """The texts of those of the chosen targets whose tokens have lost something: their end, or characters that the
        tokenizer does not know or writes as others, such as line breaks. None, or not all, in data that earlier
        versions prepared."""
        with contextlib.suppress(FileNotFoundError), open(self._folder / WHOLE_TARGETS, encoding="ascii") as lines:
            row_of = {int(self._numbers[row]): row for row in chosen}
            return {row_of[number]: text for number, text in map(json.loads, lines) if number in row_of}
        return {}

    def gather(self, side: str, chosen: Int64, width: int, fill: int) -> Int64:
        """[len(chosen), width] tokens of the chosen rows, padded with `fill`. `width` covers the longest."""
        starts, lengths = self._starts[side][chosen], self._lengths[side][chosen]
        assert lengths.max(initial=0) <= width
        tokens = self._tokens[side].view(np.ndarray)  # slices of a memmap are made in Python, four times as slowly
        gathered = np.full((len(chosen), width), fill, np.int64)
        for row, start, length in zip(gathered, starts.tolist(), lengths.tolist(), strict=True):
            row[:length] = tokens[start : start + length]
        return gathered

    def occurrences(self, side: str, numbers: int) -> Int64:
        """[numbers] how often each number below that occurs on a side, in all rows."""
        starts, lengths = self._starts[side], self._lengths[side].astype(np.int64)
        places = np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(int(lengths.sum()))
        return np.bincount(self._tokens[side][places].astype(np.int64), minlength=numbers).astype(np.int64)

    def _one(self, side: str, row: int) -> Tokens:
        start = int(self._starts[side][row])
        return self._tokens[side][start : start + int(self._lengths[side][row])]


class PreparedDataset:
    """Both parts of a prepared dataset, and its manifest."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.train = Rows(folder, "train", manifest.dtype)
        self.validation = Rows(folder, "validation", manifest.dtype)

    @classmethod
    def open(
        cls, folder: Path, *, thorough: bool = False, progress: Callable[[], object] = lambda: None
    ) -> PreparedDataset:
        """Open a folder. Raises BadData (`prepared_damaged`) unless every file is there in its full size.

        `thorough`: and with the content that was written (`progress` is called every 8 MiB).
        """
        from pydantic import ValidationError

        try:
            manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
            wrong = [
                f"{name} has {size} of {expected.bytes} bytes"
                for name, expected in manifest.files.items()
                if (size := (folder / name).stat().st_size) != expected.bytes
            ]
            wrong += [
                f"the content of {name} has changed"
                for name, expected in manifest.files.items()
                if thorough and not wrong and fingerprint(folder / name, progress) != expected.sha256
            ]
        except ValidationError as error:
            wrong = [f"{MANIFEST}: {error.errors()[0]['msg']}"]
        except OSError as error:
            wrong = [str(error)]
        if wrong:
            raise BadData(
                f"the prepared dataset {folder} is damaged: {wrong[0]}",
                code="prepared_damaged",
                hint="submit the job again: it is then prepared again",
            )
        return cls(folder, manifest)

    def rows_of_sources(self, count: int) -> list[int]:
        """[count] training rows of each source of training rows, which come first."""
        ends = [0, *(self.train.below(end) for end in self.manifest.ends[: count - 1]), len(self.train)]
        return [end - begin for begin, end in pairwise(ends)]


class Writer:
    """Writes the files of one prepared dataset into a folder that exists; call `finish` last.

    What was committed survives a kill: a later Writer in the same folder resumes after it. `also` names further files
    that grow along; those (and only those) that begin with `work.` are gone after `finish`.
    """

    def __init__(self, folder: Path, vocabulary: int, also: Sequence[str] = ()) -> None:
        self._folder = folder
        self._dtype = token_dtype(vocabulary)
        names = [f"{side}.tokens" for side in SIDES] + [f"{WORK}{side}.lengths" for side in SIDES]
        self.ledger = Ledger(folder, WORK + "log", [*names, *also])
        self.rows = self.ledger.sizes[f"{WORK}{SIDES[0]}.lengths"] // 4

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Where something has failed already (a full disk), what was not committed does not count.
        with contextlib.suppress(*[OSError] if kind else []):
            self.ledger.close()

    def add(self, inputs: Sequence[npt.ArrayLike], targets: Sequence[npt.ArrayLike]) -> None:
        """Add one or more rows: the tokens of each."""
        for side, texts in zip(SIDES, (inputs, targets), strict=True):
            ids = [np.asarray(one, self._dtype) for one in texts]
            self.append(side, np.concatenate(ids), np.array([len(one) for one in ids], np.int32))
        self.rows += len(inputs)

    def numbers(self) -> dict[str, tuple[Tokens, Int64]]:
        """By side, all that was committed: the numbers of all rows, and [rows + 1] where each row begins and ends."""
        found = {}
        for side in SIDES:
            lengths = _read(self._folder / f"{WORK}{side}.lengths", "<i4")
            ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            found[side] = (_map(self._folder / f"{side}.tokens", self._dtype.str), ends)
        return found

    def append(self, side: str, tokens: Tokens, lengths: Int32) -> None:
        """One side of some more rows: the tokens of all, one after the other, and how many each has."""
        self.ledger.append(f"{side}.tokens", tokens.astype(self._dtype, copy=False).tobytes())
        self.ledger.append(f"{WORK}{side}.lengths", lengths.astype("<i4").tobytes())

    def finish(self, parts: Mapping[str, Int64], report: DatasetSummary, ends: Sequence[int] = ()) -> None:
        """Write offsets, the row numbers of each part, and the manifest; all of it reaches the disk."""
        self.ledger.close()
        for side in SIDES:
            offsets = np.zeros(1 + self.ledger.sizes[f"{WORK}{side}.lengths"] // 4, "<i8")
            np.cumsum(_read(self._folder / f"{WORK}{side}.lengths", "<i4"), out=offsets[1:])
            offsets.tofile(self._folder / f"{side}.offsets")
        for part in PARTS:
            parts[part].astype("<i8").tofile(self._folder / f"{part}.rows")
        lasting = [file for file in sorted(self._folder.iterdir()) if not file.name.startswith(WORK)]

        files = {
            file.name: PreparedFile(bytes=file.stat().st_size, sha256=fingerprint(file, lambda: None))
            for file in lasting
            if file.name != MANIFEST
        }
        manifest = Manifest(format=FORMAT, dtype=self._dtype.str, report=report, ends=tuple(ends), files=files)
        (self._folder / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=1, ensure_ascii=False) + "\n")
        for file in [*lasting, self._folder / MANIFEST]:
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        for file in self._folder.glob(WORK + "*"):
            file.unlink()


def _map(file: Path, dtype: str) -> Any:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)


def _read(file: Path, dtype: str) -> Any:
    return np.fromfile(file, dtype=dtype)


# -- the ledger ----------------------------------------------------------------------------------------------


class Ledger:
    """Files (`names`) of a folder that grow together, by appending. `notes`: those of earlier commits, in order.

    The log has one line per commit: how large each file was then, and a note. After a kill, the next process cuts the
    files back to the last line, and continues. A file that is smaller than its last line says means that the disk lost
    something: then everything starts over.
    """

    def __init__(self, folder: Path, log: str, names: Sequence[str]) -> None:
        lines = _committed(folder, log, names)
        last = json.loads(lines[-1])["sizes"] if lines else {}
        self.sizes: dict[str, int] = {name: last.get(name, 0) for name in names}
        """Bytes in each file, those not committed yet included."""
        self.notes: list[Any] = [json.loads(line)["note"] for line in lines]
        self._files: dict[str, IO[bytes]] = {name: open(folder / name, "ab") for name in names}  # noqa: SIM115 - see close
        self._log = open(folder / log, "ab")  # noqa: SIM115
        for name, file in self._files.items():
            file.truncate(self.sizes[name])
        self._log.truncate(sum(len(line) + 1 for line in lines))
        if not lines:
            sync_folder(folder)

    def append(self, name: str, content: bytes) -> None:
        """Write at the end of one file."""
        self._files[name].write(content)
        self.sizes[name] += len(content)

    def commit(self, note: Mapping[str, Any]) -> None:
        """Make everything appended so far permanent: files first, then the line of the log."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self._log.write(json.dumps({"sizes": self.sizes, "note": note}).encode() + b"\n")
        self._log.flush()
        os.fsync(self._log.fileno())

    def close(self) -> None:
        """Close the files; buffered data is written first. May be called twice."""
        with ExitStack() as stack:
            for file in (*self._files.values(), self._log):
                stack.callback(file.close)


def _committed(folder: Path, log: str, names: Sequence[str]) -> list[bytes]:
    """The lines of the log; none if there is no log that fits these files."""
    try:
        lines = whole_lines((folder / log).read_bytes())
        sizes = [json.loads(line)["sizes"] for line in lines][-1]
        complete = all((folder / name).stat().st_size >= sizes[name] for name in names)
    except (FileNotFoundError, ValueError, LookupError):
        return []
    return lines if complete else []
