"""Rows a second of our training loop and of transformers' `Seq2SeqTrainer`: same model, rows, dtype, AdamW, threads.

    python -m benchmarks.throughput [--data FILE] [--tokenizer FOLDER] [--rounds 4] [--rows-per-round 128]

The model is FLAN-T5-small's shape (8 + 8 layers, d_model 512, d_ff 1024 gated-gelu, 6 heads, vocabulary 32128, head
not tied, dropout 0.1), random; the file is prepared as a job would have it. The contenders:

    ours     worker.training: order, micro-batches of as many positions as 8 of the longest rows, fused model, own loop
    seed     eager attention, every layer recomputed, random batches of 8 padded to their longest row
    best     as transformers documents it: sdpa, nothing recomputed, group_by_length, micro-batch 8 (widths as ours)
    expert   `best`, its length column being target tokens x 1024 + input tokens

Each is a process of its own and works when its turn has come; in every round each has one turn of as many rows. Which
rows is its own affair: it orders the whole file with its own sampler, and runs a part drawn from that evenly by cost
(benchmarks/peers.py), so its rows are a little longer or shorter than the file's. Therefore rows/s are given twice:
raw, and for the file's mean row (raw x FLOPs of a mean row of the part / of the file), and the latter are compared. The
ratios are medians over rounds; `cpu_vs_...` is the same by CPU time, which other work on the machine disturbs less.

glibc's allocator is as it comes, for all. A job's trainer has other settings (worker/supervise.py), so that memory that
runs out on a CPU can be recovered from; with them ours takes twice the CPU time.

transformers 5.23 multiplies T5's loss and gradients by the number of accumulation steps, which would clip every
gradient; `loss_is_scaled_for_ga = False` repairs that here. Before the rounds all get the same rows, in steps of a
micro-batch: the losses of held-out rows after them must agree to within three standard deviations of the peers', who
differ in dropout and attention, or a hundredth of what they have learned. JSON on the last line. Exit code 1 when a
limit is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.command_line import RECIPES, parse
from benchmarks.contender import Figures, Turn, contender
from benchmarks.corpus import dataset_of, prepared_job
from benchmarks.peers import DTYPES, NAMES, Race
from worker.training.tasks.seq2seq import builtin
from worker.training.tasks.seq2seq.layout import PairFlops

KEYS = (
    "vs_seed", "vs_best", "vs_expert", "cpu_vs_seed", "cpu_vs_best", "cpu_vs_expert", "same_loss_difference",
    "same_loss_allowed", "contenders", "rows", "rows_per_round", "rounds", "batch_size", "dtype", "matmul_gflops",
    "threads", "shape", "load", "accumulation_fault", "versions", "broken",
)  # fmt: skip
LIMITS = {"vs_seed": 2.5, "vs_best": 1.3, "vs_expert": 1.0}
STRETCH = {"vs_best": 1.45, "vs_expert": 1.15}
LEAST_ROWS = 2000
SAME_LOSS = 0.01
"""Of what was learned."""
SHAPES: dict[str, dict[str, Any]] = {
    "small": builtin.CONFIG
    | {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6}
    | {"num_layers": 8, "num_decoder_layers": 8},
    "tiny": builtin.CONFIG | {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2},
}


def main(argv: list[str]) -> int:
    """Prepare, let them run, compare, print."""
    arguments = parsed(argv)
    load = [os.getloadavg()[0]]
    rates = {name: matmul_rate(dtype, arguments.threads) for name, dtype in DTYPES.items()}
    dtype = arguments.dtype if arguments.dtype != "auto" else max(rates, key=lambda name: rates[name])
    print(f"GFLOP/s of matrix products: {rates}; {dtype} it is")
    with tempfile.TemporaryDirectory(prefix="longhaul-throughput-") as scratch, ExitStack() as running:
        config = SHAPES[arguments.shape]
        run = prepared_job(
            arguments.data, Path(scratch), tokenizer=arguments.tokenizer, config=config, data={"validation": 0.02}
        )
        plan, rows = run.plan(), dataset_of(run).train
        assert plan.data.prepared is not None
        race = Race(
            model=str(plan.model.folder),
            prepared=plan.data.prepared,
            dtype=dtype,
            threads=arguments.threads,
            batch_size=arguments.batch_size,
            micro_batch=arguments.micro_batch,
            rounds=arguments.rounds,
            steps_per_round=max(1, arguments.rows_per_round // arguments.batch_size),
            same_steps=arguments.same_steps,
            held_out=arguments.held_out,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            seed=arguments.seed,
        )
        as_json = json.dumps(asdict(race))
        commands = {name: [sys.executable, "-m", "benchmarks.peers", name, as_json] for name in NAMES}
        contenders = {
            name: running.enter_context(contender(name, command, Path(scratch))) for name, command in commands.items()
        }
        mean_flops = PairFlops.of_config(config).rows(rows.input_lengths, rows.target_lengths) / len(rows)
        table = take_turns(contenders, race, mean_flops)
    load.append(os.getloadavg()[0])
    result = {
        **compared(table),
        **same_loss(table),
        "contenders": {name: summary(figures) for name, figures in table.items()},
        "rows": len(rows),
        "rows_per_round": race.steps_per_round * race.batch_size,
        "rounds": race.rounds,
        "batch_size": race.batch_size,
        "dtype": dtype,
        "matmul_gflops": rates,
        "threads": race.threads,
        "shape": arguments.shape,
        "load": load,
        "accumulation_fault": "repaired: loss_is_scaled_for_ga = False",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
    result["broken"] = wrong(result) + ([] if arguments.smoke else broken(result))
    show(result)
    print(json.dumps(result))
    return 1 if result["broken"] else 0


def parsed(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description="Ours against transformers.")
    parser.add_argument("--data", type=Path, default=RECIPES, help="a file of rows")
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with a tokenizer.json; else one is learned from the rows"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows-per-round", type=int, default=128, help="of each contender")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of an optimizer step")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument(
        "--same-steps", type=int, default=16, help="first steps, of a micro-batch each, the same rows for all"
    )
    parser.add_argument("--held-out", type=int, default=64, help="validation rows for the losses")
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="auto: the faster in matrix products"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parse(
        parser, argv, shape="tiny", rounds=2, rows_per_round=8, batch_size=8, micro_batch=4, held_out=4, same_steps=2,
        threads=1,
    )  # fmt: skip
    if arguments.batch_size % arguments.micro_batch:
        parser.error(f"--batch-size {arguments.batch_size} is not a multiple of --micro-batch {arguments.micro_batch}")
    return arguments


def matmul_rate(dtype: torch.dtype, threads: int) -> float:
    """GFLOP/s of the feed-forward's product at 2,048 positions: which dtype this CPU computes fast in."""
    torch.set_num_threads(threads)
    left, right = torch.randn(2048, 512, dtype=dtype), torch.randn(512, 1024, dtype=dtype)
    seconds = []
    for _ in range(20):
        begun = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - begun)
    return round(2 * 2048 * 512 * 1024 / min(seconds) / 1e9, 1)


# -- turns ---------------------------------------------------------------------------------------------------


def take_turns(contenders: dict[str, Turn], race: Race, mean_flops: float) -> dict[str, Figures]:
    """All turns of all; what each has reported, and its rounds with rows/s (`mean_flops`: of a row of the file)."""
    table: dict[str, Figures] = {}
    for name, turn in contenders.items():
        table[name] = turn() | {"rounds": []}
        assert table[name].pop("event") == "ready"
    for name, turn in contenders.items():
        figures = turn()
        assert figures["event"] == "same"
        table[name] |= {"start_loss": figures["start_loss"], "same_loss": figures["loss"]}
        print(f"the same {race.same_steps * race.micro_batch} rows, {name:7} loss {figures['loss']:.4f}", flush=True)
    for number in range(race.rounds + 1):
        # Another one begins every time.
        for name in np.roll(list(contenders), -number):
            figures = contenders[name]()
            assert figures["event"] == "round"
            table[name]["peak_bytes"] = figures.pop("peak_bytes")
            if number:  # 0 is the warm-up
                table[name]["rounds"].append(rated(figures, mean_flops))
                print(f"round {number}, {name:7} {table[name]['rounds'][-1]['rows_per_s']:.3f} rows/s", flush=True)
    for name, turn in contenders.items():
        table[name]["end_loss"] = turn()["loss"]
    return table


def rated(figures: Figures, mean_flops: float) -> Figures:
    """A round with its rates; `rows_per_s` counts rows of the file's mean FLOPs."""
    mean_rows = figures["flops"] / mean_flops
    return figures | {
        "raw_rows_per_s": figures["rows"] / figures["seconds"],
        "rows_per_s": mean_rows / figures["seconds"],
        "rows_per_cpu_s": mean_rows / figures["cpu_seconds"],
        "tokens_per_s": figures["tokens"] / figures["seconds"],
    }


# -- comparing -----------------------------------------------------------------------------------------------


def compared(table: dict[str, Figures]) -> dict[str, float]:
    """Medians over the rounds of ours over each of the others."""
    ours = table["ours"]["rounds"]
    ratios = {}
    for name in NAMES[1:]:
        for key, rate in (("vs", "rows_per_s"), ("cpu_vs", "rows_per_cpu_s")):
            pairs = zip(ours, table[name]["rounds"], strict=True)
            ratios[f"{key}_{name}"] = statistics.median(one[rate] / other[rate] for one, other in pairs)
    return ratios


def same_loss(table: dict[str, Figures]) -> dict[str, Any]:
    """Our loss after the same rows against the mean of the peers', and how far apart they may be. Nats."""
    peers = [table[name]["same_loss"] for name in NAMES[1:]]
    mean = statistics.fmean(peers)
    learned = statistics.fmean(table[name]["start_loss"] for name in NAMES[1:]) - mean
    return {
        "same_loss_difference": table["ours"]["same_loss"] - mean,
        "same_loss_allowed": max(SAME_LOSS * learned, 3 * statistics.stdev(peers)),
    }


def summary(figures: Figures) -> Figures:
    """One contender over all rounds: medians of rates, totals of the rest."""
    rounds = figures.pop("rounds")
    total = {
        key: sum(one[key] for one in rounds) for key in ("rows", "tokens", "flops", "padded_flops", "micro_batches")
    }
    rates = ("rows_per_s", "raw_rows_per_s", "tokens_per_s", "rows_per_cpu_s")
    return {
        **{key: statistics.median(one[key] for one in rounds) for key in rates},
        "rows_per_s_of_rounds": [round(one["rows_per_s"], 3) for one in rounds],
        "rows_run": total["rows"],
        "tokens_per_row": total["tokens"] / total["rows"],
        "rows_per_micro_batch": total["rows"] / total["micro_batches"],
        "waste": 1 - total["flops"] / total["padded_flops"],
        **{key: figures[key] for key in ("epoch_waste", "epoch_micro_batches", "start_loss", "same_loss", "end_loss")},
        "peak_gib": figures["peak_bytes"] / 2**30,
    }


def wrong(result: Figures) -> list[str]:
    """What has to hold at any size and does not, in words."""
    found, rows = [], result["rounds"] * result["rows_per_round"]
    for name, figures in result["contenders"].items():
        if figures["rows_run"] != rows:
            found.append(f"{name} has run {figures['rows_run']} rows of {rows}")
        if not figures["end_loss"] < figures["start_loss"]:
            found.append(f"{name} has learned nothing: {figures['start_loss']:.4f} to {figures['end_loss']:.4f}")
    if abs(result["same_loss_difference"]) > result["same_loss_allowed"]:
        found.append(f"losses after the same rows differ by {result['same_loss_difference']:+.4f}")
    return found


def broken(result: Figures) -> list[str]:
    """Limits that do not hold, in words."""
    found = [f"{key} {result[key]:.2f} < {least}" for key, least in LIMITS.items() if result[key] < least]
    if result["rows"] < LEAST_ROWS:
        found.append(f"{result['rows']} rows to draw from, fewer than {LEAST_ROWS}")
    return found


def show(result: Figures) -> None:
    """The table for people."""
    columns = ["rows_per_s", "raw_rows_per_s", "tokens_per_s", "waste", "epoch_waste", "tokens_per_row"]
    columns += ["rows_per_micro_batch", "peak_gib", "start_loss", "same_loss", "end_loss"]
    print(f"{'':8}" + "".join(f"{column.replace('_per_', '/').replace('micro_batch', 'mb'):>16}" for column in columns))
    for name, figures in result["contenders"].items():
        print(f"{name:8}" + "".join(f"{figures[column]:16.3f}" for column in columns))
    for key, least in LIMITS.items():
        stretch = f", stretch {STRETCH[key]}" if key in STRETCH else ""
        print(f"{key} {result[key]:.2f} (limit {least}{stretch}); by CPU time {result[f'cpu_{key}']:.2f}")
    for line in result["broken"]:
        print(f"broken: {line}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
