"""Blocks encoded by one process per core, in the order of the source; by this process alone if there are few.

    blocks ─▶ at most a few in hand ─▶ workers (spawned, tied to this process, one thread each) ─▶ encoded, in order

Start it from a main thread only: workers are killed when the thread that spawned them ends (jobs/process/lifeline.py).
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import get_context
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jobs.errors import HostOutOfMemory
from jobs.process.lifeline import tie_to_parent
from worker.training.machine.cpu_limit import ended_by_limit

if TYPE_CHECKING:  # a worker imports this module before it is tied
    from worker.training.dataset.encoding import BlockEncoder, EncodedBlock, Recipe
    from worker.training.rows.row import Block

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
