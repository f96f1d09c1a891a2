"""What the contenders of `causal_throughput` have in common; they run in two environments, so this imports torch alone.

Each is a process that works when its turn has come: it says on its standard output what it has done (a line of JSON)
and waits for a line on its standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class CausalRace:
    """What is the same for all of them."""

    model: str
    """Folder of the checkpoint, in bf16."""
    prepared: str
    """Folder of the prepared dataset: the rows of `chats`, as ours reads them."""
    chats: str
    """JSON lines, `{"messages": [...]}` each."""
    held_out: str
    """JSON lines: token ids of a row, and the positions of those that are learned."""
    template: str
    """The model's chat template, with `{% generation %}` around what is learned."""
    rows: int
    longest: int
    """Tokens of a row at most."""
    threads: int
    batch_size: int
    """Rows of an optimizer step."""
    micro_batch: int
    """Rows of a peer's micro-batch; ours: of the longest shape."""
    turns: int
    """That the epoch is cut into; the first is the warm-up."""
    learning_rate: float
    max_grad_norm: float
    seed: int


class Turns:
    """A contender's side of the conversation: `ready`, then a line for every turn, then its held-out loss."""

    def __init__(self, race: CausalRace) -> None:
        torch.set_num_threads(race.threads)
        self._race = race
        self._channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is not an answer
        self._began = self._cpu_began = 0.0
        self._counts = dict.fromkeys(("rows", "tokens", "learned", "positions"), 0)
        self._turn = 0

    def ready(self, model: torch.nn.Module, steps: int, **versions: str) -> None:
        """`steps` are to come: of the epoch, by `model`. Waits for the first turn."""
        self._model, self._steps = model, steps
        loss = self._loss()  # which reads all weights
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is counted from here on
        self._memory = _status("VmRSS")
        self._tell("ready", loss=loss, steps=steps, versions=versions)

    def ran(self, **counts: int) -> None:
        """A micro-batch: its rows, their tokens, those that are learned, and positions, padding included."""
        for name, count in counts.items():
            self._counts[name] += count

    def stepped(self, step: int) -> None:
        """Optimizer step number `step` is done, from 1: where a turn ends, tells and waits."""
        if step < round((self._turn + 1) * self._steps / self._race.turns):
            return
        self._turn += 1
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        self._tell("turn", **counts, peak_bytes=_status("VmHWM") - self._memory)
        if step == self._steps:
            self._tell("end", loss=self._loss())

    def _tell(self, event: str, **figures: Any) -> None:
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        answer = {"event": event, "seconds": seconds, "cpu_seconds": cpu_seconds, **figures}
        self._channel.write(json.dumps(answer) + "\n")
        self._channel.flush()
        ctypes.CDLL(None).malloc_trim(0)  # what they keep of what they have freed, the others need
        if not sys.stdin.readline():
            raise SystemExit("nobody is listening any more")
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def _loss(self) -> float:
        """Mean over the learned tokens of the held-out rows, each by itself, of fp32 logits."""
        model: Any = self._model
        total, count = 0.0, 0
        model.eval()
        with torch.no_grad():
            for line in Path(self._race.held_out).read_text().splitlines():
                ids, learned = map(torch.tensor, json.loads(line))
                logits = model(input_ids=ids[None], use_cache=False).logits[0, learned - 1]
                total += float(F.cross_entropy(logits.float(), ids[learned], reduction="sum"))
                count += len(learned)
        model.train()
        return total / count


def _status(name: str) -> int:
    """Bytes of memory of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
