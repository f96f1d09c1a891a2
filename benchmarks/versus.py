"""Our loop against another's: each a process that works when its turn has come, so that all of them meet the same load.

A contender says on its standard output what it has done (a line of JSON) and waits for a line on its standard input:
once it is ready, after every turn, and in the end. The first turn is the warm-up; ratios are medians over the others.

`Said`, `CausalRace` and `Turns` run in the environment of a peer, too. So this imports numpy and torch, and of this
project what needs no package.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from jobs.process.lifeline import tied_to_parent

ROOT = Path(__file__).resolve().parent.parent
SAME_LOSS = 0.01
"""How far losses may be apart: of what was learned."""
Figures = dict[str, Any]
Turn = Callable[[], Figures]

# -- who lets them run ---------------------------------------------------------------------------------------


def race_options(parser: argparse.ArgumentParser, *, batch_size: int) -> None:
    """Options that all races have. `batch_size`: the default."""
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="rows of an optimizer step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--held-out", type=int, default=64, help="other rows, for the losses")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=42)


def refuse_uneven(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with 2 unless a step is whole micro-batches."""
    if options.batch_size % options.micro_batch:
        parser.error(f"--batch-size {options.batch_size} is not a multiple of --micro-batch {options.micro_batch}")


@contextmanager
def contenders(commands: Mapping[str, Sequence[str]], scratch: Path) -> Iterator[dict[str, Turn]]:
    """Runs them all; every call of one gives it a turn and returns what it says at its end."""
    with ExitStack() as running:
        yield {name: running.enter_context(_contender(name, each, scratch)) for name, each in commands.items()}


@contextmanager
def _contender(name: str, command: Sequence[str], scratch: Path) -> Iterator[Turn]:
    # As training sets them: threads that spin for long would take the cores from whoever's turn it is.
    threads = {"GOMP_SPINCOUNT": "1000", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    environment = os.environ | threads | {"HF_HUB_OFFLINE": "1"}
    log = scratch / f"{name}.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            tied_to_parent(*command), cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        to_it, from_it = process.stdin, process.stdout
        assert to_it is not None and from_it is not None
        begun = False

        def turn() -> Figures:
            nonlocal begun
            if begun:
                to_it.write("\n")
                to_it.flush()
            begun = True
            line = from_it.readline()
            if not line:
                raise RuntimeError(f"{name} has ended with {process.wait()}:\n{log.read_text()[-3000:]}")
            figures: Figures = json.loads(line)
            return figures

        try:
            yield turn
        finally:
            process.kill()


def next_turns(turns: Mapping[str, Turn], event: str) -> dict[str, Figures]:
    """One turn of each, at whose end all of them say `event`."""
    said = {name: turn() for name, turn in turns.items()}
    assert {figures.pop("event") for figures in said.values()} == {event}
    return said


def take_turns(turns: Mapping[str, Turn], table: Mapping[str, Figures], rounds: int, of: str, mean: float) -> None:
    """All turns of all, then their losses: `warm_up`, `rounds` and `end_loss` in their rows of the table.

    A row of the corpus has `mean` of `of` (such as tokens): by that rows of a turn are counted.
    """
    for number in range(rounds + 1):
        # Another one begins every time.
        for name in np.roll(list(turns), -number).tolist():
            figures = next_turns({name: turns[name]}, "turn")[name]
            if not number:
                table[name].update(warm_up=figures, rounds=[])
                continue
            table[name]["rounds"].append(rated(figures, of, mean))
            print(f"round {number}, {name:15} {table[name]['rounds'][-1]['rows_per_s']:.3f} rows/s", flush=True)
    for name, figures in next_turns(turns, "end").items():
        table[name]["end_loss"] = figures["loss"]


def rated(figures: Figures, of: str, mean: float) -> Figures:
    """A turn with its rates; `rows_per_s` counts rows of the mean of the corpus."""
    mean_rows = figures[of] / mean
    return figures | {
        "raw_rows_per_s": figures["rows"] / figures["seconds"],
        "rows_per_s": mean_rows / figures["seconds"],
        "rows_per_cpu_s": mean_rows / figures["cpu_seconds"],
        "tokens_per_s": figures["tokens"] / figures["seconds"],
    }


def values(figures: Figures, name: str) -> list[float]:
    """Of all rounds of one."""
    return [one[name] for one in figures["rounds"]]


def medians(figures: Figures, *names: str) -> Figures:
    """Over the rounds of one; and the rate of each."""
    return {
        **{name: statistics.median(values(figures, name)) for name in names},
        "rows_per_s_of_rounds": [round(rate, 3) for rate in values(figures, "rows_per_s")],
    }


def compared(table: Mapping[str, Figures]) -> dict[str, float]:
    """Medians over the rounds of ours over each of the others."""
    ratios = {}
    for name in table.keys() - {"ours"}:
        for key, rate in (("vs", "rows_per_s"), ("cpu_vs", "rows_per_cpu_s")):
            pairs = zip(values(table["ours"], rate), values(table[name], rate), strict=True)
            ratios[f"{key}_{name}"] = statistics.median(ours / other for ours, other in pairs)
    return dict(sorted(ratios.items(), reverse=True))


def below(ratios: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    """Limits that do not hold, in words."""
    return [f"{key} {ratios[key]:.2f} < {least}" for key, least in limits.items() if ratios.get(key, least) < least]


def unlearned(table: Mapping[str, Figures]) -> list[str]:
    """Who has learned nothing, in words."""
    return [
        f"{name} has learned nothing: {figures['start_loss']:.4f} to {figures['end_loss']:.4f}"
        for name, figures in table.items()
        if not figures["end_loss"] < figures["start_loss"]
    ]


def show(table: Mapping[str, Figures], columns: Sequence[str]) -> None:
    """The table for people."""
    names = (column.replace("_per_", "/").replace("micro_batch", "mb") for column in columns)
    print(f"{'':16}" + "".join(f"{name:>16}" for name in names))
    for name, figures in table.items():
        print(f"{name:16}" + "".join(f"{figures[column]:16.3f}" for column in columns))


def versions(transformers: str) -> dict[str, str]:
    """Of what has run."""
    return {"torch": torch.__version__, "transformers": transformers, "python": platform.python_version()}


# -- a contender's side --------------------------------------------------------------------------------------


class Said:
    """What a contender says, and how long it has worked for it."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is not an answer
        self._start()

    def tell(self, event: str, **figures: Any) -> None:
        """A line; then waits for the next turn."""
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        answer = {"event": event, "seconds": seconds, "cpu_seconds": cpu_seconds, **figures}
        self._channel.write(json.dumps(answer) + "\n")
        self._channel.flush()
        ctypes.CDLL(None).malloc_trim(0)  # what they keep of what they have freed, the others need
        if not sys.stdin.readline():
            raise SystemExit("nobody is listening any more")
        self._start()

    def begin_memory(self) -> None:
        """The peak is that above what there is now."""
        self.forget_peak()
        self._memory = _status("VmRSS")

    def forget_peak(self) -> None:
        """The peak is that of what follows, above the same as before."""
        Path("/proc/self/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """Of memory."""
        return _status("VmHWM") - self._memory

    def _start(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()


def _status(name: str) -> int:
    """Bytes of memory of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


# -- causal models: contenders of two environments -----------------------------------------------------------


@dataclass(frozen=True)
class CausalRace:
    """What is the same for all contenders of `causal_throughput`."""

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
    """A contender of `causal_throughput`: `ready`, then a line for every turn, then its held-out loss."""

    def __init__(self, race: CausalRace) -> None:
        self._race, self._said = race, Said(race.threads)
        self._counts = dict.fromkeys(("rows", "tokens", "learned", "positions"), 0)
        self._turn = 0

    def ready(self, model: torch.nn.Module, steps: int, **versions: str) -> None:
        """`steps` are to come: of the epoch, by `model`. Waits for the first turn."""
        self._model, self._steps = model, steps
        loss = self._loss()  # which reads all weights
        self._said.begin_memory()
        self._said.tell("ready", loss=loss, steps=steps, versions=versions)

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
        self._said.tell("turn", **counts, peak_bytes=self._said.peak_bytes)
        if step == self._steps:
            self._said.tell("end", loss=self._loss())

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
