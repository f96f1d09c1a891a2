"""What `gpu_throughput` prints: a line as it is measured, all of it as JSON in the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import threading
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_bench import Figures
from benchmarks.gpu_ladder import LADDER, MICRO_BATCH, OURS, SEED, LadderConfiguration
from jobs.gpus import peak_flops

LIMITS = {"vs_seed": 3.0, "mfu": 0.4}
DATA_CENTRE = ("NVIDIA H200", "NVIDIA H100", "NVIDIA B200")
COLUMNS = "rows/s raw   rows/s  tokens/s   MFU  peak GiB  kernels  busy  waste  rows/mb"


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
