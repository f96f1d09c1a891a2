"""FLAN-T5-XL's shape on a GPU: rows a second from the seed configuration to ours, step by step.

    python -m benchmarks.gpu_throughput [--minutes 9] [--rounds 2] [--lengths FILE.npy | --synthetic] [--out FILE.json]
    python -m benchmarks.gpu_throughput --device cpu --shape tiny --micro-batches 4 …           a dry run
    python -m benchmarks.gpu_throughput --data FILE --tokenizer FOLDER --write-lengths OUT.npy  lengths of a corpus

Needs torch, transformers, numpy and pydantic from the machine, and this repository. Weights are random, made on the
GPU; rows are random tokens with the lengths of a corpus (benchmarks/random_rows.py). A GPU of 32 GB is emulated on a
larger one: the allocator gets 31.4 GiB less 0.6 for the CUDA context; the states of an 8-bit optimizer (5.4 GiB) are
allocated, and gradients stay between micro-batches. Timed is forward and backward, copies to the GPU included, without
optimizer and without preparing batches.

Every configuration (benchmarks/gpu_bench.py) orders all rows for an epoch, and runs micro-batches drawn from that
evenly by cost. Since such a part may be a little longer or shorter than the corpus, `rows/s` is that of its mean row:
FLOPs that the model needs for the part's real tokens / seconds / FLOPs of a mean row. Hence ratios of rows/s are ratios
of MFU. `micro-batch` is rows for random batches, rows of the longest shape for ours; 8, then the largest that fits. Out
of memory is a result. `busy` is the share of time that kernels run (the rest is launching and waiting: what CUDA graphs
could win at most); of the second round only the rates are taken, to show drift.

JSON on the last line, also when time is up: `vs_seed` (our best / the seed at micro-batch 8, both on the emulated
GPU), `mfu` (the highest). Exit code 1 if on a GPU a limit is broken (vs_seed 3, MFU 0.4 on an H200,
H100 or B200), or if anything failed but for memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.command_line import parse
from benchmarks.gpu_bench import (
    LADDER,
    MICRO_BATCH,
    OURS,
    SEED,
    Bench,
    Epoch,
    Figures,
    LadderConfiguration,
    TimeUp,
    make_model,
)
from benchmarks.random_rows import LENGTHS, LONGEST, random_rows, read_lengths, synthetic_lengths, write_lengths
from jobs.gpus import peak_flops
from jobs.text.units import format_duration
from worker.training.doctor.random_t5 import SHAPES as CHECKPOINTS
from worker.training.machine import expandable_segments
from worker.training.tasks.seq2seq.layout import PairFlops

KEYS = (
    "vs_seed", "vs_largest_seed", "best", "mfu", "mfu_of", "complete", "drift", "gpu", "gpu_gib", "context_gib",
    "peak_tflops", "shape", "lengths", "dropout", "minutes", "allocator", "torch", "transformers", "python", "weights",
    "rows", "mean_lengths", "same", "table", "broken",
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "xl": CHECKPOINTS["xl"],
    "tiny": CHECKPOINTS["small"] | {"d_model": 64, "d_ff": 128, "num_heads": 2},
}
LIMITS = {"vs_seed": 3.0, "mfu": 0.4}
DATA_CENTRE = ("NVIDIA H200", "NVIDIA H100", "NVIDIA B200")
COLUMNS = "rows/s raw   rows/s  tokens/s   MFU  peak GiB  kernels  busy  waste  rows/mb"
GRACE_S = 20.0
"""What was begun may end so long after time is up; then all that there is is printed, and the process ends."""


def main(argv: list[str]) -> int:
    """Measure, print, compare."""
    arguments = parsed(argv)
    if arguments.write_lengths is not None:
        pairs = write_lengths(arguments.data, arguments.tokenizer, arguments.write_lengths)
        print(f"{arguments.write_lengths}: {len(pairs)} rows, mean input and target {pairs.mean(0).round(1).tolist()}")
        return 0
    end = time.monotonic() + 60 * arguments.minutes
    # As the trainer does it; read when the first memory of the GPU is taken.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    device = torch.device(arguments.device)
    expandable_segments.leave_off_where_broken(device)
    report = Report(arguments, device)
    # Compiling cannot be interrupted, and whoever lends the machine ends the process without asking.
    bell = threading.Timer(60 * arguments.minutes + GRACE_S, report.leave)
    bell.daemon = True
    bell.start()
    try:
        with tempfile.TemporaryDirectory(prefix="longhaul-gpu-") as scratch:
            run(arguments, device, report, end, Path(scratch))
        report.complete = True
    except TimeUp:
        print(f"time is up ({format_duration(60 * arguments.minutes)})", flush=True)
    finally:
        bell.cancel()
    return report.finish()


def run(arguments: argparse.Namespace, device: torch.device, report: Report, end: float, scratch: Path) -> None:
    """All configurations, as often as there are rounds. Raises TimeUp."""
    config = SHAPES[arguments.shape]
    lengths = synthetic_lengths(4096) if arguments.synthetic else read_lengths(arguments.lengths)
    if arguments.rows is not None:  # evenly out of all: files may be sorted
        lengths = lengths[np.linspace(0, len(lengths) - 1, arguments.rows).astype(int)]
    lengths = lengths.clip(max=arguments.longest)
    rows = random_rows(lengths, config["vocab_size"], scratch)
    start = time.perf_counter()
    model = make_model(config, device)
    weights = sum(parameter.numel() for parameter in model.parameters())
    report.facts |= {"weights": weights, "rows": len(rows), "mean_lengths": lengths.mean(0).tolist()}
    print(f"{weights:,} weights made in {format_duration(time.perf_counter() - start)}; {len(rows)} rows", flush=True)
    bench = Bench(
        model,
        Epoch(rows, PairFlops.of_config(config)),
        dropout=arguments.dropout,
        budget_bytes=(arguments.gpu_gib - arguments.context_gib) * 2**30,
        backend=arguments.backend or ("inductor" if device.type == "cuda" else "eager"),
        seconds=arguments.seconds,
        micro_batches=arguments.micro_batches,
        largest=arguments.largest,
        deadline=lambda: end - time.monotonic(),
    )
    sizes: dict[str, list[int]] = {}
    print(f"{'':44}{COLUMNS}", flush=True)
    for number in range(arguments.rounds):
        for chosen in LADDER:
            try:
                if number == 0:
                    first(bench, chosen, sizes.setdefault(chosen.name, []), report)
                elif sizes[chosen.name]:
                    bench.apply(chosen)
                    for size in sizes[chosen.name]:
                        report.add(chosen, number + 1, {"micro_batch": size, **bench.measure(chosen, size)})
            except TimeUp:
                raise
            except Exception as error:
                # The others can still be measured, on a machine that may not come back; it says so, and ends with 1.
                traceback.print_exc()
                report.add(chosen, number + 1, {"error": f"{type(error).__name__}: {error}"[:500]})


def first(bench: Bench, chosen: LadderConfiguration, sizes: list[int], report: Report) -> None:
    """The first time: find out what fits, count kernels and compare losses, too."""
    about = bench.apply(chosen)
    for size in bench.sizes(chosen):
        if "out_of_memory" not in size:
            size |= bench.measure(chosen, size["micro_batch"])
        if "out_of_memory" not in size:
            sizes.append(size["micro_batch"])
            size |= bench.kernels(chosen, size["micro_batch"])
        report.add(chosen, 1, size | about)
        about = {}
    bench.refuse_uncompiled(chosen)
    report.same[chosen.name] = bench.same(chosen)


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_throughput", description="T5 XL on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="xl")
    parser.add_argument("--minutes", type=float, default=9.0, help="print what there is after so many")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--micro-batches", type=int, help="of each measurement, in place of --seconds")
    parser.add_argument("--largest", type=int, default=64, help="micro-batch that is tried")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="as --write-lengths writes it")
    parser.add_argument("--synthetic", action="store_true", help="log-normal lengths")
    parser.add_argument("--rows", type=int, help="only so many")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of a row's input, and of its target")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--gpu-gib", type=float, default=31.4, help="memory of the emulated GPU (RTX 5090)")
    parser.add_argument("--context-gib", type=float, default=0.6, help="of which the CUDA context takes so much")
    parser.add_argument("--peak-tflops", type=float, help="of a GPU that jobs/gpus.py does not know")
    parser.add_argument("--backend", help="of torch.compile; default inductor, on the CPU eager")
    parser.add_argument("--out", type=Path, help="write the JSON there after every measurement, too")
    parser.add_argument("--data", type=Path, help="a file of rows, for --write-lengths")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json, for --write-lengths")
    parser.add_argument("--write-lengths", type=Path, help="write the lengths of --data there, and end")
    arguments = parse(
        parser,
        argv,
        device="cpu",
        shape="tiny",
        rounds=1,
        micro_batches=1,
        largest=8,
        rows=16,
        longest=8,
        dropout=0.0,
    )
    if arguments.write_lengths is not None and arguments.data is None:
        parser.error("--write-lengths needs --data")
    return arguments


# -- what is printed: a line as it is measured, all of it as JSON in the end -------------------------------------------


class Report:
    """The table as it grows, and what follows from it."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if cuda else "cpu"
        self.peak = 1e12 * arguments.peak_tflops if arguments.peak_tflops else peak_flops(name)
        self.complete = False
        self.table: list[Figures] = []
        self.same: dict[str, Figures] = {}
        self.facts: Figures = {
            "gpu": name,
            "gpu_gib": arguments.gpu_gib if cuda else None,
            "context_gib": arguments.context_gib if cuda else None,
            "peak_tflops": self.peak / 1e12 if self.peak else None,
            "shape": arguments.shape,
            "lengths": "synthetic" if arguments.synthetic else arguments.lengths.name,
            "dropout": arguments.dropout,
            "minutes": arguments.minutes,
            "allocator": os.environ.get("PYTORCH_ALLOC_CONF"),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        self._out: Path | None = arguments.out
        self._lock = threading.Lock()

    def add(self, chosen: LadderConfiguration, number: int, figures: Figures) -> None:
        """One line more, printed at once."""
        if "flops_per_s" in figures:
            figures["mfu"] = figures["flops_per_s"] / self.peak if self.peak else None
        with self._lock:
            self.table.append({"configuration": chosen.name, "round": number, **figures})
            print(_line(self.table[-1]), flush=True)
            self._write()

    def finish(self) -> int:
        """Print everything, JSON last; returns the exit code."""
        with self._lock:
            self._write()
            result = self.result()
            for name, one in result["drift"].items():
                print(f"{name:44}second round {100 * one:+.1f} %")
            for name, one in self.same.items():
                print(f"{name:44}same rows: loss {one['loss']:.4f}, gradient norm {one['grad_norm']:.4f}")
            print(json.dumps(result), flush=True)
        return 1 if result["broken"] else 0

    def leave(self) -> None:
        """End the process now, whatever it is doing."""
        print("time is up, and something does not end", flush=True)
        os._exit(self.finish() or 1)

    def result(self) -> Figures:
        """What goes into the JSON."""
        rates: dict[tuple[str, int], list[float]] = {}
        mfus: dict[str, list[float]] = {}
        for line in self.table:
            if "mean_rows_per_s" in line:
                rates.setdefault((line["configuration"], line["micro_batch"]), []).append(line["mean_rows_per_s"])
                if line["mfu"] is not None:
                    mfus.setdefault(f"{line['configuration']} at {line['micro_batch']}", []).append(line["mfu"])
        limited = {one.name for one in LADDER if one.limited}
        mean = {key: statistics.fmean(values) for key, values in rates.items()}
        ours = {key: rate for key, rate in mean.items() if key[0] in OURS & limited}
        seeds = {size: rate for (name, size), rate in mean.items() if name == SEED}
        best = max(ours, key=lambda key: ours[key]) if ours else None
        top = max(mfus, key=lambda name: statistics.fmean(mfus[name])) if mfus else None
        result = {
            "vs_seed": ours[best] / seeds[MICRO_BATCH] if best and MICRO_BATCH in seeds else None,
            "vs_largest_seed": ours[best] / max(seeds.values()) if best and seeds else None,
            "best": f"{best[0]} at {best[1]}" if best else None,
            "mfu": statistics.fmean(mfus[top]) if top else None,
            "mfu_of": top,
            "complete": self.complete,
            "drift": {
                f"{name} at {size}": values[1] / values[0] - 1 for (name, size), values in rates.items() if values[1:]
            },
            **self.facts,
            "same": self.same,
            "table": self.table,
        }
        result["broken"] = self._broken(result)
        return result

    def _broken(self, result: Figures) -> list[str]:
        broken = [f"{line['configuration']}: {line['error']}" for line in self.table if "error" in line]
        if not self.complete or result["gpu"] == "cpu" or result["shape"] != "xl":
            return broken
        limits = LIMITS if result["gpu"].startswith(DATA_CENTRE) else {"vs_seed": LIMITS["vs_seed"]}
        return broken + [f"{name} < {limit}" for name, limit in limits.items() if not (result[name] or 0) >= limit]

    def _write(self) -> None:
        if self._out is not None:
            self._out.write_text(json.dumps(self.result(), indent=1) + "\n")


def _line(line: Figures) -> str:
    about = f"{line['round']} {line['configuration']:37.37} {line.get('micro_batch', ''):>3}"
    if "error" in line:
        return f"{about} failed: {line['error']}"
    if "out_of_memory" in line:
        return f"{about} out of memory"

    def number(name: str, form: str) -> str:
        width = form.partition(".")[0]
        value = line.get(name)
        return f"{'':>{width}}" if value is None else f"{value:{form}}"

    fields = {"rows_per_s": "12.1f", "mean_rows_per_s": "9.1f", "tokens_per_s": "10.0f", "mfu": "6.3f"}
    fields |= {"peak_gib": "10.2f", "kernels": "9.0f", "busy_fraction": "6.2f", "waste_fraction": "7.3f"}
    fields |= {"rows_per_micro_batch": "9.1f"}
    return about + " " + "".join(number(name, form) for name, form in fields.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
