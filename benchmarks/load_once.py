"""A model is loaded once, and held once: memory of the real path against loading fp32 and casting it afterwards.

    python -m benchmarks.load_once [--size xl|tiny] [--device cpu|cuda]    about 3 minutes and 6 GB of disk for xl
    python -m benchmarks.load_once --convert [--size xl|tiny]              fp32 into the model store; 18 GB of disk

Writes a random checkpoint of FLAN-T5-XL's shape into a temporary folder (TMPDIR), which is removed at the end. Every
figure is taken in a process of its own, after a model of a few KB was loaded there, so that imports do not count.
Memory on the CPU is all resident memory of the process (VmHWM above VmRSS before): anonymous and mapped pages; the
weights are read in full before it is taken, for until then their pages are not there. On CUDA it is the allocator's.

JSON on the last line. Exit code 1 when a limit of the project is broken, or when the control passes for good.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from benchmarks.command_line import ROOT, parse
from jobs.text.units import GIB, bytes_alike
from worker.training.doctor.random_t5 import SHAPES, write_checkpoint
from worker.training.journal import Journal
from worker.training.machine.usage import process_bytes
from worker.training.models import model_store
from worker.training.network import guards
from worker.training.network.model import load
from worker.training.tasks.seq2seq.layout import layout_of
from worker.training.tasks.seq2seq.task import Seq2Seq

KEYS = (
    "size", "device", "parameter_bytes", "load_peak_ratio", "load_event_ratio", "loads", "copies", "seconds",
    "anonymous_bytes", "mapped_weight_bytes", "step_seconds", "step_peak_bytes", "control_ratio", "control_parameters",
    "control_refused", "broken",
)  # fmt: skip
"""Without `--convert`."""
PEAK_LIMIT = 1.05
CONTROL_LEAST = 1.5
HOST_LIMIT = 2 * 10**9
CONTROL_SHAPE = {"xl": "xl-width", "tiny": "tiny"}
"""The control holds everything two or three times: 17 GB for XL, which a machine of 24 GB in use has not got."""


# -- the parent ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """Run what the command line asks for; print figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_once")
    parser.add_argument("--size", choices=("xl", "tiny"), default="xl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--convert", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parse(parser, argv, size="tiny")
    if arguments.child:
        which, one, other = arguments.child
        print(json.dumps(CHILDREN[which](Path(one), Path(other), arguments.device)))
        return 0
    with tempfile.TemporaryDirectory(prefix="longhaul-load-") as name:
        home = Path(name)
        write_checkpoint(home / "small", SHAPES["small"])
        figures = conversion(home, arguments.size) if arguments.convert else loading(home, arguments)
    print(json.dumps(figures))
    return 1 if figures["broken"] and not arguments.smoke else 0


def loading(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of the real path, and of the control beside it."""
    parameters = layout_of(SHAPES[arguments.size]).parameters
    need(home, disk=2 * parameters, memory=5 * parameters if arguments.device == "cpu" else 0)
    write_checkpoint(home / "model", SHAPES[arguments.size])
    figures = child(arguments.device, "load", home / "small", home / "model")
    shutil.rmtree(home / "model")
    control_shape = CONTROL_SHAPE[arguments.size]
    write_checkpoint(home / "control", SHAPES[control_shape])
    control = child(arguments.device, "control", home / "small", home / "control")
    refused = broken(control)
    limits = broken(figures)
    if control["load_peak_ratio"] < CONTROL_LEAST or not refused:
        limits.append(f"the control passes: {control['load_peak_ratio']:.3f}")
    return {
        "size": arguments.size,
        "device": arguments.device,
        **figures,
        "control_ratio": control["load_peak_ratio"],
        "control_parameters": layout_of(SHAPES[control_shape]).parameters,
        "control_refused": refused,
        "broken": limits,
    }


def conversion(home: Path, size: str) -> dict[str, Any]:
    """Figures of making a model's place in the store from fp32 shards."""
    parameters = layout_of(SHAPES[size]).parameters
    need(home, disk=6 * parameters, memory=HOST_LIMIT)
    shards = write_checkpoint(home / "fp32", SHAPES[size], torch.float32, shard_bytes=parameters)
    (home / "bf16").mkdir()
    figures = child("cpu", "convert", home / "fp32", home / "bf16")
    damage = model_store.damage(home / "bf16", Seq2Seq(), thorough=True)
    limits = [f"the result is damaged: {damage}"] if damage else []
    if figures["convert_host_peak_bytes"] >= HOST_LIMIT:
        limits.append(f"host peak {figures['convert_host_peak_bytes']} is not below {HOST_LIMIT}")
    return {"size": size, "source_bytes": 4 * parameters, "shards": shards, **figures, "broken": limits}


def broken(figures: dict[str, Any]) -> list[str]:
    """The limits that figures of a load break: the check that the real path must pass, and the control must not."""
    found = []
    if figures["load_peak_ratio"] > PEAK_LIMIT:
        found.append(f"load_peak_ratio {figures['load_peak_ratio']:.3f} is above {PEAK_LIMIT}")
    if figures["loads"] != 1:
        found.append(f"{figures['loads']} loads, not 1")
    if figures["copies"]:
        found.append(f"{figures['copies']} parameters are not where they were loaded to")
    return found


def need(home: Path, *, disk: int, memory: int) -> None:
    """Stop, saying what is missing, rather than fill a disk or have the kernel kill someone."""
    if (free := shutil.disk_usage(home).free) < disk + GIB:
        wanted, there = bytes_alike(disk, free)
        raise SystemExit(f"{wanted} are needed in {home.parent} (TMPDIR), {there} are free")
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    if available < memory:
        wanted, there = bytes_alike(memory, available)
        raise SystemExit(f"{wanted} of memory are needed, {there} are available")


def child(device: str, *words: object) -> dict[str, Any]:
    """The figures that a fresh process prints."""
    command = [sys.executable, "-m", "benchmarks.load_once", "--device", device, "--child", *map(str, words)]
    said = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures


# -- the children ----------------------------------------------------------------------------------------------------


def load_child(small: Path, folder: Path, name: str) -> dict[str, Any]:
    """Load as the trainer does, read everything, then forward and backward over short rows."""
    device = torch.device(name)
    load(small, device, task=Seq2Seq(), dropout=0.0, fused=True, activation_checkpointing=1)
    loads = count_loads()
    before, start = in_use(device), time.perf_counter()
    loaded = load(folder, device, task=Seq2Seq(), dropout=0.0, fused=True, activation_checkpointing=1)
    read_all(loaded.model)
    peak, seconds = peak_use(device) - before, time.perf_counter() - start
    pages = {"anonymous_bytes": process_bytes("RssAnon"), "mapped_weight_bytes": mapped_bytes(folder)}
    start = time.perf_counter()
    ids = torch.arange(3, 19, device=device).reshape(2, 8)
    loaded.model.train()
    loss = loaded.model(input_ids=ids, labels=ids).loss
    loss.backward()
    without = [key for key, parameter in loaded.model.named_parameters() if parameter.grad is None]
    assert not without and bool(torch.isfinite(loss)), (without, loss)
    return {
        "parameter_bytes": loaded.parameter_bytes,
        "load_peak_ratio": peak / loaded.parameter_bytes,
        "load_event_ratio": loaded.peak_ratio,
        "loads": len(loads),
        "copies": len(guards.moved_parameters(loaded.model, loaded.pointers)),
        "seconds": seconds,
        **pages,
        "step_seconds": time.perf_counter() - start,
        "step_peak_bytes": peak_use(device),
    }


def control_child(small: Path, folder: Path, name: str) -> dict[str, Any]:
    """Load fp32, then cast: what `from_pretrained` without a dtype and a later `.to(bf16)` come to."""
    device = torch.device(name)
    load(small, device, task=Seq2Seq(), dropout=0.0, fused=True, activation_checkpointing=1)
    loads = count_loads()
    before, start = begin_use(device), time.perf_counter()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32, device_map={"": device})
    pointers = guards.pointers_of(model)
    model = model.to(torch.bfloat16)
    read_all(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "parameter_bytes": size,
        "load_peak_ratio": (peak_use(device) - before) / size,
        "loads": len(loads),
        "copies": len(guards.moved_parameters(model, pointers)),
        "seconds": time.perf_counter() - start,
    }


def convert_child(source: Path, target: Path, name: str) -> dict[str, Any]:
    """Convert; the peak is that of the whole process, interpreter and torch included."""
    start = time.perf_counter()
    before = begin_use(torch.device(name))
    model_store.convert(source, target, source.name, Seq2Seq(), Journal(target.with_name("progress.jsonl")))
    return {
        "convert_host_peak_bytes": process_bytes("VmHWM"),
        "convert_host_growth_bytes": process_bytes("VmHWM") - before,
        "seconds": time.perf_counter() - start,
    }


CHILDREN: dict[str, Callable[[Path, Path, str], dict[str, Any]]] = {
    "load": load_child,
    "control": control_child,
    "convert": convert_child,
}


def count_loads() -> list[object]:
    """A list that grows by one with every call of `from_pretrained` from now on."""
    calls: list[object] = []
    original = AutoModelForSeq2SeqLM.from_pretrained

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **options)

    setattr(AutoModelForSeq2SeqLM, "from_pretrained", counted)  # noqa: B010 - an assignment is an error to mypy
    return calls


# -- memory in use: resident on the CPU (anonymous and mapped pages), the allocator's on CUDA --------------------------


def read_all(model: torch.nn.Module) -> None:
    """Read every number of every parameter."""
    for parameter in model.parameters():
        for piece in parameter.detach().view(torch.int16).view(-1).split(1 << 20):
            piece.max()


def in_use(device: torch.device) -> int:
    """Bytes."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_bytes("VmRSS")


def begin_use(device: torch.device) -> int:
    """Bytes in use; the peak is counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return in_use(device)


def peak_use(device: torch.device) -> int:
    """Bytes, since `begin_use` (or since `load`, which starts over)."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_bytes("VmHWM")


def mapped_bytes(folder: Path) -> int:
    """Resident pages of the weight files."""
    total, counts = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if not first.endswith(":"):
                counts = str(folder) in line
            elif counts and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
