"""Every benchmark at its smallest size, and whether its JSON has the keys that it should: `make bench-smoke`.

    python -m benchmarks.smoke [NAME …] [--at-once 2]

A benchmark is a module of this folder with `KEYS`, the names in the JSON on its last line; the others are parts of
some. It has to end with 0, or to say why this machine cannot run it, which is told as skipped. All are forked from one
process, and so are the programs that they start (`benchmarks.forking`): what is measured is worth nothing.

JSON on the last line. Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.command_line import TRACES
from benchmarks.forking import Ended, Forks
from jobs.text.units import format_duration
from worker.training.__main__ import set_library_switches
from worker.training.warm import MODULES as TRAINERS

FOLDER = Path(__file__).parent
IMPORTED = (
    *TRAINERS, "httpx", "requests", "torch.profiler", "transformers.models.auto.modeling_auto",
    "transformers.trainer_seq2seq", "service.main", "worker.publish", "worker.supervise",
    "worker.training.doctor.random_t5",
)  # fmt: skip
"""What takes long, before anything is forked."""
LONGEST_S = 900.0
"""A benchmark that has not ended by then stands still."""
LAST_LINES = 40
FIRST = (
    "two_revisions", "engines", "sweep", "soak", "sink_interference", "boxes", "gpu_throughput", "throughput",
    "data_rate", "try_interference",
)  # fmt: skip
"""Those that take longest, so that none of them is left over in the end."""


@dataclass(frozen=True)
class BenchmarkEnd:
    """What became of one benchmark."""

    name: str
    failure: str | None
    """None: none."""
    skipped: str | None
    """Why this machine cannot run it; None: it could."""
    seconds: float
    cpu_s: float


@dataclass
class Benchmarks:
    """Those that run, wait and have ended."""

    forks: Forks
    folder: Path
    waiting: list[str]
    running: dict[str, float] = field(default_factory=dict)
    """Name → when it began."""
    ended: list[BenchmarkEnd] = field(default_factory=list)

    def run(self, at_once: int) -> list[BenchmarkEnd]:
        """All of them, so many beside each other."""
        while self.waiting or self.running:
            while self.waiting and len(self.running) < at_once:
                self.begin(self.waiting.pop(0))
            self.forks.serve(1.0)
            for name, began in self.running.items():
                late = time.monotonic() - began - LONGEST_S
                if late > 0:  # first asked to clean up, as by Ctrl-C
                    self.forks.send(name, signal.SIGINT if late < 20 else signal.SIGKILL)
        return self.ended

    def begin(self, name: str) -> None:
        """Start one."""
        began = self.running[name] = time.monotonic()
        said, log = self.folder / f"{name}.out", self.folder / f"{name}.log"
        nothing = os.open(os.devnull, os.O_RDONLY)
        files = [nothing, *(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for file in (said, log))]

        def told(end: Ended) -> None:
            del self.running[name]
            last = (said.read_text(errors="replace").splitlines() or [""])[-1]
            failure, skipped = judge(end.code, last, keys_of(name))
            outcome = BenchmarkEnd(name, failure, skipped, time.monotonic() - began, self.forks.cpu_s[name])
            self.ended.append(outcome)
            show(outcome, [*said.read_text(errors="replace").splitlines()[-LAST_LINES:],
                           *log.read_text(errors="replace").splitlines()[-LAST_LINES:]])  # fmt: skip

        self.forks.begin(name, [f"benchmarks.{name}", "--smoke"], files, os.environ, told)
        for each in files:
            os.close(each)


def main(argv: list[str]) -> int:
    """Run them, and print the JSON line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description="Does every benchmark run?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--at-once", type=int, default=2, help="so many beside each other")
    arguments = parser.parse_args(argv)
    there = names()
    if unknown := set(arguments.names) - set(there):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(there)}")
    began = time.monotonic()
    import_all(IMPORTED)
    folder = Path(tempfile.mkdtemp(prefix="longhaul-smoke-"))  # a TemporaryDirectory would be removed by every fork
    (folder / "traces").mkdir()
    os.environ[TRACES] = os.fspath(folder / "traces")
    forks = Forks(folder)
    try:
        outcomes = Benchmarks(forks, folder, in_order(arguments.names or there)).run(arguments.at_once)
    finally:
        forks.close()
        shutil.rmtree(folder)
    failed = sorted(each.name for each in outcomes if each.failure is not None)
    skipped = {each.name: each.skipped for each in sorted(outcomes, key=lambda each: each.name) if each.skipped}
    print(json.dumps({
        "benchmarks": len(outcomes), "failed": failed, "skipped": skipped,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(sum(each.cpu_s for each in outcomes) + time.process_time(), 1),
    }))  # fmt: skip
    return 1 if failed else 0


def names() -> list[str]:
    """Of all benchmarks."""
    return sorted(file.stem for file in FOLDER.glob("*.py") if keys_of(file.stem) is not None)


@functools.cache
def keys_of(name: str) -> frozenset[str] | None:
    """What the JSON of a benchmark has to hold, read from its source; None: the module is not a benchmark."""
    for node in ast.parse((FOLDER / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "KEYS":
            return frozenset(ast.literal_eval(node.value))
    return None


def in_order(chosen: Collection[str]) -> list[str]:
    """The long ones first."""
    return [name for name in FIRST if name in chosen] + [name for name in sorted(chosen) if name not in FIRST]


def import_all(modules: Iterable[str]) -> None:
    """Before anything is forked, and without starting a thread: a fork would be without it."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    set_library_switches("train")
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    gc.collect()
    gc.freeze()


def judge(code: int, last: str, keys: Collection[str] | None) -> tuple[str | None, str | None]:
    """What is wrong with a benchmark that has ended so, and why it was skipped; None: nothing, it was not."""
    try:
        result = json.loads(last)
    except ValueError:
        result = None
    if not isinstance(result, dict):
        return f"its last line is not JSON (exit code {code})", None
    if code != 0:
        return f"exit code {code}", None
    if result.keys() == {"skipped"}:
        return None, str(result["skipped"])
    missing, unknown = sorted(set(keys or ()) - result.keys()), sorted(result.keys() - set(keys or ()))
    said = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(unknown)}"] * bool(unknown)
    return f"JSON {' and '.join(said)}" if said else None, None


def show(outcome: BenchmarkEnd, output: Sequence[str]) -> None:
    """A line of it; what it said, if it has failed."""
    what = "FAILED" if outcome.failure else "skipped" if outcome.skipped else "ok"
    why = f"  {outcome.failure or outcome.skipped or ''}".rstrip()
    took = f"{format_duration(outcome.seconds):>10} (CPU {format_duration(outcome.cpu_s)})"
    print(f"{what:8}{outcome.name:20}{took}{why}", flush=True)
    if outcome.failure:
        print("\n".join(f"    {line[:500]}" for line in output), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
