"""FLAN-T5-XL's shape on a GPU: rows a second from the seed configuration to ours, step by step.

    python -m benchmarks.gpu_throughput [--minutes 9] [--rounds 2] [--lengths FILE.npy | --synthetic] [--out FILE.json]
    python -m benchmarks.gpu_throughput --device cpu --shape tiny --micro-batches 4 …           a dry run
    python -m benchmarks.gpu_throughput --data FILE --tokenizer FOLDER --write-lengths OUT.npy  lengths of a corpus

Needs torch, transformers and numpy from the machine, and this repository. Weights are random, made on the GPU; rows
are random tokens with the lengths of a corpus (benchmarks/random_rows.py). A GPU of 32 GB is emulated on a larger one:
the allocator gets 31.4 GiB less 0.6 for the CUDA context; the states of an 8-bit optimizer (5.4 GiB) are allocated,
and gradients stay between micro-batches. Timed is forward and backward, copies to the GPU included, without optimizer
and without preparing batches.

Every configuration (benchmarks/gpu_ladder.py) orders all rows for an epoch, and runs micro-batches drawn from that
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
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_bench import Bench, TimeUp
from benchmarks.gpu_epoch import Epoch
from benchmarks.gpu_ladder import LADDER, LadderConfiguration, make_model
from benchmarks.gpu_report import COLUMNS, Report
from benchmarks.random_rows import LENGTHS, random_rows, read_lengths, synthetic_lengths, write_lengths
from jobs.text.units import format_duration
from worker.training.doctor.random_t5 import SHAPES as CHECKPOINTS
from worker.training.machine import expandable_segments
from worker.training.tasks.seq2seq.flops import PairFlops

SHAPES: dict[str, dict[str, Any]] = {
    "xl": CHECKPOINTS["xl"],
    "tiny": CHECKPOINTS["small"] | {"d_model": 64, "d_ff": 128, "num_heads": 2},
}
GRACE_S = 20.0
"""What was begun may end so long after time is up; then all that there is is printed, and the process ends."""


def main(argv: list[str]) -> int:
    """Measure, print, compare."""
    arguments = parse(argv)
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


def parse(argv: list[str]) -> argparse.Namespace:
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
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--gpu-gib", type=float, default=31.4, help="memory of the emulated GPU (RTX 5090)")
    parser.add_argument("--context-gib", type=float, default=0.6, help="of which the CUDA context takes so much")
    parser.add_argument("--peak-tflops", type=float, help="of a GPU that jobs/gpus.py does not know")
    parser.add_argument("--backend", help="of torch.compile; default inductor, on the CPU eager")
    parser.add_argument("--out", type=Path, help="write the JSON there after every measurement, too")
    parser.add_argument("--data", type=Path, help="a file of rows, for --write-lengths")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer.json, for --write-lengths")
    parser.add_argument("--write-lengths", type=Path, help="write the lengths of --data there, and end")
    arguments = parser.parse_args(argv)
    if arguments.write_lengths is not None and arguments.data is None:
        parser.error("--write-lengths needs --data")
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
