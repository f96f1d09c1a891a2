"""A prepared dataset in the making: grows by encoded blocks, in order; resumes where a killed process stopped.

Duplicates are found here, the only place that all rows pass. What has been added is committed every few blocks: flat
token files, lengths, keys of the rows, what was rejected, and the counts. A restart cuts the files back to the last
commit and asks for the blocks after it.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.dataset_report import ScoreSummary
from jobs.errors import HostOutOfMemory
from jobs.process.lifeline import tie_to_parent
from jobs.text.units import GIB
from worker.training.dataset import report
from worker.training.dataset.data import SIDES, WHOLE_TARGETS, WORK, Int64, Writer
from worker.training.dataset.encoding import EncodedBlock, LabelReport
from worker.training.dataset.report import IN_FULL, IN_SUMMARY, Lengths, full_report, summary
from worker.training.dataset.split import evaluation_rows, shared_inputs, split
from worker.training.machine.host import ended_by_limit
from worker.training.rows.row import RowCounts
from worker.training.rows.row_filter import DUPLICATE, Rejection, Seen, UInt64

if TYPE_CHECKING:
    from worker.training.dataset.encoding import BlockEncoder, EncodedBlock, Recipe
    from worker.training.rows.row import Block

# -- pool --------------------------------------------------------------------------------------------------------------
# Blocks encoded by one process per core, in the order of the source; by this process alone if there are few.
#
#     blocks ─▶ at most a few in hand ─▶ workers (spawned, tied to this process, one thread each) ─▶ encoded, in order
#
# Start it from a main thread only: workers are killed when the thread that spawned them ends
# (jobs/process/lifeline.py).

MOST = 16
"""At most this many workers: one process reads and writes for all of them."""
WORTH_IT = 16
"""Blocks. Fewer than this are encoded before a pool could start."""
_AHEAD = 2
"""Blocks in flight for each worker: one in work, one waiting."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class EncoderPool:
    """Encodes blocks with `workers` processes, started when they are first needed."""

    def __init__(self, recipe: Recipe, workers: int) -> None:
        self._recipe, self._workers = recipe, min(workers, MOST)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> EncoderPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def encoded(self, blocks: Iterator[Block]) -> Generator[EncodedBlock, None, None]:
        """All blocks, in order.

        Raises what encoding one raises; of a process that has ended, `ended_by_limit` or HostOutOfMemory
        (`worker_killed`).
        """
        first = list(islice(blocks, WORTH_IT)) if self._pool is None else []
        if self._pool is None and (self._workers < 2 or len(first) < WORTH_IT):
            from worker.training.dataset.encoding import BlockEncoder

            encoder = BlockEncoder(self._recipe)
            for block in chain(first, blocks):
                yield encoder.encode(block)
            return
        try:
            yield from self._in_order(chain(first, blocks))
        except BrokenProcessPool as error:
            assert self._pool is not None
            children = dict(self._pool._processes)
            self._pool.shutdown(wait=True)
            if limits := [limit for child in children.values() if (limit := ended_by_limit(child.exitcode))]:
                raise limits[0] from None
            raise HostOutOfMemory(
                "one of the processes that prepare the data was killed, most likely for want of memory",
                code="worker_killed",
                hint="give the preparing container more memory or fewer cores, and submit again; "
                "what was complete is kept",
            ) from error

    def _in_order(self, blocks: Iterator[Block]) -> Iterator[EncodedBlock]:
        pool = self._started()
        in_hand: deque[Future[EncodedBlock]] = deque()
        for block in blocks:
            in_hand.append(pool.submit(_encode, block))
            if len(in_hand) >= _AHEAD * self._workers:
                yield in_hand.popleft().result()
        while in_hand:
            yield in_hand.popleft().result()

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers, get_context("spawn"), _begin, (os.getpid(), pickle.dumps(self._recipe))
            )
        return self._pool


# -- in a worker -----------------------------------------------------------------------------------------------------

_encoder: BlockEncoder | None = None


def _begin(parent: int, recipe: bytes) -> None:
    """First of all tie this process to its parent; then import and open what it needs."""
    global _encoder
    tie_to_parent(parent)
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from worker.training.dataset.encoding import BlockEncoder

    _encoder = BlockEncoder(pickle.loads(recipe))


def _encode(block: Any) -> EncodedBlock:
    assert _encoder is not None
    return _encoder.encode(block)


# -- assembly ----------------------------------------------------------------------------------------------------------

REJECTED, REPORT, PICTURE = "rejected.jsonl", "dataset.json", "dataset.png"
BLOCKS_PER_COMMIT = 8
_MOST_ROWS, _MOST_BYTES = 10_000, 2 * GIB
"""Of whole targets: those that are kept, and bytes of those that may be."""
_KEYS, _SPLIT_KEYS, _TARGETS = f"{WORK}keys", f"{WORK}split_keys", f"{WORK}{WHOLE_TARGETS}"
_REPLAYED = 1 << 16


class Assembly:
    """The dataset in `folder`, made of several sources, one after the other. Close it (`with`)."""

    def __init__(self, folder: Path, vocabulary: int, sources: int, validation: float | str) -> None:
        also = (REJECTED, _KEYS, _SPLIT_KEYS, _TARGETS, *(_full_lengths(side) for side in SIDES))
        self._folder = folder
        self._sources, self._validation = sources, validation
        self._writer = Writer(folder, vocabulary, also)
        self.source_counts = [RowCounts() for _ in range(sources)]
        self.blocks = [0] * sources
        """Blocks of each source that were added."""
        self.ends: list[int] = []
        """Examples up to the end of each source that is complete."""
        self._new, self._new_blocks = RowCounts(), 0
        self._seen = Seen()
        for note in self._writer.ledger.notes:
            self.source_counts[note["source"]].add(RowCounts.from_json(note["tally"]))
            self.blocks[note["source"]] += note["blocks"]
            if note["ended"]:
                self.ends.append(note["rows"])
        with open(folder / _KEYS, "rb") as keys:
            while piece := keys.read(8 * _REPLAYED):
                self._seen.first_times(np.frombuffer(piece, "<u8"))

    def __enter__(self) -> Assembly:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    @property
    def rows(self) -> int:
        """Examples of the rows kept so far."""
        return self._writer.rows

    def add(self, block: EncodedBlock) -> None:
        """The next block of the source that is not complete."""
        kept = self._seen.first_times(block.keys)
        counts, ledger = block.counts, self._writer.ledger
        duplicates = [
            Rejection(block.numbers[row], DUPLICATE, block.excerpts[row]) for row in np.flatnonzero(~kept).tolist()
        ]
        counts.kept, counts.duplicates = int(kept.sum()), len(duplicates)
        kept_examples = np.repeat(kept, block.examples)
        counts.became = int(kept_examples.sum())
        for side in SIDES:
            texts = block.texts[side].only(kept_examples)
            counts.tokens[side] = len(texts.tokens)
            counts.truncated[side] = int((texts.full_lengths > texts.lengths).sum())
            counts.unknown_texts[side] = int((texts.unknown_tokens > 0).sum())
            counts.unknown_tokens += int(texts.unknown_tokens.sum())
            for found in texts.unknown.values():
                counts.unknown.update(found)
            self._writer.append(side, texts.tokens, texts.lengths)
            ledger.append(_full_lengths(side), texts.full_lengths.astype("<i4").tobytes())
        numbers = self.rows + np.cumsum(kept_examples) - 1
        split_keys = np.repeat(block.split_keys, block.examples)
        for place, text in block.whole_targets.items():
            wanted = kept_examples[place] and self._may_be_evaluated(split_keys[place])
            if wanted and ledger.sizes[_TARGETS] < _MOST_BYTES:
                ledger.append(_TARGETS, json.dumps([int(numbers[place]), text]).encode() + b"\n")
        self._writer.rows += counts.became
        ledger.append(_KEYS, block.keys[kept].astype("<u8").tobytes())
        ledger.append(_SPLIT_KEYS, split_keys[kept_examples].astype("<u8").tobytes())
        for one in sorted([*block.rejected, *duplicates], key=lambda one: one.number):
            entry = {"file": block.file, "line": one.number, "reason": one.reason, "excerpt": one.excerpt}
            # ASCII: excerpts hold what many readers take for the end of a line.
            ledger.append(REJECTED, json.dumps(entry).encode() + b"\n")
        self._new.add(counts)
        self._new_blocks += 1
        if self._new_blocks == BLOCKS_PER_COMMIT:
            self._commit(ended=False)

    def _may_be_evaluated(self, split_key: np.uint64) -> bool:
        """Whether the row of the current source may be held out. Of no other is the target kept: it is only where very
        few inputs have nearly all rows that `split` holds such a one out."""
        if isinstance(self._validation, str):
            return len(self.ends) == self._sources - 1
        return self._validation == 0 or bool(split_key < 4 * self._validation * 2.0**64)

    def end_source(self) -> None:
        """The source is complete."""
        self._commit(ended=True)

    def _commit(self, *, ended: bool) -> None:
        source = len(self.ends)
        note = {"source": source, "blocks": self._new_blocks, "ended": ended, "rows": self.rows}
        self._writer.ledger.commit(note | {"tally": self._new.as_json()})
        self.source_counts[source].add(self._new)
        self.blocks[source] += self._new_blocks
        if ended:
            self.ends.append(self.rows)
        self._new, self._new_blocks = RowCounts(), 0

    def finish(self, names: Sequence[str], limits: Mapping[str, int], label_report: LabelReport) -> None:
        """Split the rows, report, and complete the folder. `names` of the sources; `limits` of tokens by side.

        Raises BadData as `split`.
        """
        split_keys: UInt64 = np.fromfile(self._folder / _SPLIT_KEYS, "<u8")
        parts: dict[str, Int64] = split(split_keys, self.ends, self._validation)
        self._keep_targets(parts["validation"] if len(parts["validation"]) else parts["train"])
        lengths = {
            side: Lengths.of(np.fromfile(self._folder / _full_lengths(side), "<i4"), limits[side]) for side in SIDES
        }
        rows = {part: len(numbers) for part, numbers in parts.items()}
        short = summary(self.source_counts, lengths, rows, self._validation, shared_inputs(split_keys, parts))
        labels = {most: label_report(self._writer.numbers(), split_keys, parts, most) for most in (IN_SUMMARY, IN_FULL)}
        field = "scores" if isinstance(labels[IN_FULL], ScoreSummary) else "labels"
        full = full_report(names, self.source_counts, short.model_copy(update={field: labels[IN_FULL]}))
        short = short.model_copy(update={field: labels[IN_SUMMARY]})
        (self._folder / REPORT).write_text(json.dumps(full.model_dump(), indent=1, ensure_ascii=False) + "\n")
        (self._folder / PICTURE).write_bytes(report.draw(lengths))
        self._writer.finish(parts, short, self.ends)

    def _keep_targets(self, rows: Int64) -> None:
        """Those of the rows for which evaluations generate texts first."""
        evaluated = set(rows[evaluation_rows(len(rows), _MOST_ROWS, "random")].tolist())
        with open(self._folder / _TARGETS, "rb") as lines, open(self._folder / WHOLE_TARGETS, "wb") as kept:
            kept.writelines(line for line in lines if json.loads(line)[0] in evaluated)


def _full_lengths(side: str) -> str:
    return f"{WORK}{side}.full_lengths"
