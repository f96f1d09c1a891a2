"""A LoRA job of a large model through the trainer's own code, on a simulated GPU: what each part of it takes.

    python -m benchmarks.simulated_attempt [qwen|t5] [--layers N]   # with the module `simgpu`, its libraries preloaded

Qwen2.5-7B with adapters of rank 128 on a GPU of 32 GB, or FLAN-T5-XL with rank 16: a checkpoint file without values
is loaded; steps of the longest rows, memory that runs out in one, an evaluation, a checkpoint, a resumption from it,
and the result, merged. The simulated GPU counts memory and computes nothing: no text would ever end, so none is
generated. `--layers`: the same widths with so many layers (of T5, in each stack).

| figure | of | limit |
|---|---|---|
| `load_gib`, `resume_gib` | peak of torch's allocator while loading, besides the weights | 0.0625 |
| `max_error` | relative error of a step's planned peak, before and after memory ran out, and resumed | 0.01 |
| `over_plan_gib` | what an evaluation takes besides the planned peak of a step | 0 |
| `save_gib` | GPU memory that a checkpoint takes besides a step's | 0.001 |
| `waits` | of the host for the GPU in a step | 0 |
| `graphs` | compiled after the first step | 0 |
| `math_kernels` | calls of attention without a fused kernel in a step | 0 |
| `unpinned_gib` | of a checkpoint's copies on the host, what is not pinned | 0.001 |
| `merge_gib` | peak of torch's allocator while the merged model is checked and written | the GPU's |

JSON on the last line. Exit code 1 when a limit is broken.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from worker.training.__main__ import set_library_switches

set_library_switches("train")  # before torch is imported
# Pieces of weights that are hashed are then zeros, and no longer what lay there.
os.environ.setdefault("SIMGPU_COPY_KIB", str(64 * 1024))

# ruff: noqa: E402
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.command_line import parse, skipped
from benchmarks.simulated_lora import NEEDED, is_simulated, models
from jobs.attempt import TrainResult
from jobs.disk.rundir import RunDir
from jobs.gpus import GpuFacts
from jobs.spec import parse_spec
from jobs.text.units import GIB
from jobs.trainer_facts import CheckpointSaved, OomRecovered
from worker.training.context import TrainingContext, set_up
from worker.training.doctor.exactness import SDPA
from worker.training.doctor.job import ListeningJournal, make_run
from worker.training.doctor.measured_steps import Stepping, Steps, sample_gradient
from worker.training.evaluate import evaluate
from worker.training.journal import StopSignal
from worker.training.machine.numerics import prepare_device
from worker.training.machine.process_monitor import ProcessMonitor
from worker.training.planning.alternatives import Alternatives
from worker.training.planning.budget import on_gpu
from worker.training.planning.ladder import Setting
from worker.training.planning.memory_plan import CONTEXT_BYTES, plan_memory
from worker.training.result import write_result
from worker.training.steps.shape import MicroBatchShape
from worker.training.tasks.causal import builtin
from worker.training.tasks.seq2seq import builtin as builtin_t5
from worker.training.tasks.task import Task

KEYS = (
    "model", "parameters", "trained", "load_gib", "step_gib", "plan_gib", "waits", "graphs", "math_kernels",
    "attention_calls", "evaluation_gib", "over_plan_gib", "save_gib", "checkpoint_gib", "unpinned_gib", "recovered",
    "merge_gib", "result_gib", "resume_gib", "max_error", "broken",
)  # fmt: skip
LIMITS = {
    "load_gib": 0.0625, "resume_gib": 0.0625, "max_error": 0.01, "over_plan_gib": 0.0, "save_gib": 0.001, "waits": 0,
    "graphs": 0, "math_kernels": 0, "unpinned_gib": 0.001, "merge_gib": 32_113 / 1024 - CONTEXT_BYTES / GIB,
}  # fmt: skip
LONGEST = {"qwen": (1536, 1536), "t5": (256, 256)}
BATCH, ROWS = {"qwen": 8, "t5": 64}, {"qwen": 2, "t5": 8}  # a step's groups have as many rows as a micro-batch
SETTING = Setting(1, "adamw")
GPU = torch.device("cuda")


def write_empty_model(folder: Path, name: str, task: Task, config: dict[str, Any]) -> None:
    """Config, tokenizer and weights, of which the file has only holes: zeros that take no room."""
    folder.mkdir(parents=True)
    learn = builtin.learn_tokenizer if name == "qwen" else builtin_t5.learn_tokenizer
    learn(["knead and bake the bread"]).save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    layout = task.layout(config)
    header: dict[str, Any] = {}
    offset = 0
    for tensor, shape in layout.shapes.items():
        end = offset + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
        file.seek(8 + len(text) + header[layout.head]["data_offsets"][0])
        file.write(b"\x01")  # else head and embedding were equal, which says that they are one


def make_job(home: Path, name: str, task: Task, config: dict[str, Any], rank: int) -> RunDir:
    """Planned for all of the GPU, with rows of the longest shape."""
    inputs, targets = LONGEST[name]
    limits = {"max_tokens": inputs} if name == "qwen" else {"max_input_tokens": inputs, "max_target_tokens": targets}
    spec = parse_spec(
        {
            "model": "random",
            "task": task.name,
            "data": {"train": "random.jsonl"} | limits,
            "method": {"type": "lora", "rank": rank, "merge": True},
            "memory": {
                "optimizer": SETTING.optimizer,
                "micro_batch": ROWS[name],
                "activation_checkpointing": SETTING.activation_checkpointing,
            },
            "training": {"epochs": 20, "batch_size": BATCH[name]},
            "evaluation": {"samples": 0},
            "speed": {"compile": False},
        }
    )
    write_empty_model(home / "model", name, task, config)
    properties = torch.cuda.get_device_properties(GPU)
    budget = on_gpu(properties.total_memory, "gpu", GpuFacts(properties.name, properties.total_memory))
    memory = plan_memory(spec, task, config, LONGEST[name], device="cuda", budget=budget)
    rows = (BATCH[name], LONGEST[name])
    return make_run(home / "runs", spec, config, home / "model", memory, rows, rows, task)


def error_of(steps: Steps) -> float:
    """Of the planned peak, relative to the measured one."""
    return (sum(steps.planned.values()) - steps.planned["context"]) / steps.allocated - 1


def math_kernels(stepping: Stepping) -> tuple[int, int]:
    """Calls of attention in a step: without a fused kernel, and all."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        stepping.step()
    assert record.profiler is not None
    events = record.profiler.kineto_results.events()  # as recorded: a tree of them takes longer than all the rest
    calls = [event.name().removeprefix(SDPA) for event in events if event.name().startswith(SDPA)]
    assert calls, "attention is torch's"
    return sum("math" in call for call in calls), len(calls)


def begin(run: RunDir, journal: ListeningJournal, attempt: int) -> TrainingContext:
    """As an attempt does."""
    prepare_device(GPU)
    return set_up(run, GPU, ProcessMonitor.of(GPU), journal, StopSignal(), attempt)


def excess_gib(context: TrainingContext) -> float:
    """What loading took besides the weights."""
    return round((context.loaded.peak_ratio - 1) * context.loaded.parameter_bytes / GIB, 4)


def peak_gib() -> float:
    """Of torch's allocator since it was last asked."""
    found = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return found


def measure(home: Path, name: str, task: Task, config: dict[str, Any], rank: int) -> dict[str, Any]:
    """All figures."""
    simgpu = importlib.import_module("simgpu")
    run = make_job(home, name, task, config, rank)
    journal = ListeningJournal(home / "journal.jsonl")
    context = begin(run, journal, 1)
    figures: dict[str, Any] = {
        "model": name, "parameters": context.loaded.parameters, "trained": context.loaded.trained_parameters,
        "load_gib": excess_gib(context),
    }  # fmt: skip
    stepping = Stepping(context, GPU)
    stepping.step()
    steps = stepping.measure(2)
    errors = [error_of(steps)]
    planned = (sum(steps.planned.values()) - steps.planned["context"]) / GIB
    figures |= {"step_gib": round(steps.allocated / GIB, 3), "plan_gib": round(planned, 3)}
    figures |= {"waits": steps.waits, "graphs": steps.graphs}
    figures["math_kernels"], figures["attention_calls"] = math_kernels(stepping)

    peak_gib()
    evaluate(context)
    figures["evaluation_gib"] = round(found := peak_gib(), 3)
    figures["over_plan_gib"] = max(0.0, found - planned)

    before, pinned = torch.cuda.memory_allocated() / GIB, simgpu.pinned()
    context.saver.save(context.state)
    context.saver.wait()
    figures["save_gib"] = max(0.0, peak_gib() - before)
    [saved] = [fact for fact in journal.facts if isinstance(fact, CheckpointSaved)]
    figures["checkpoint_gib"] = round(saved.bytes / GIB, 3)
    figures["unpinned_gib"] = max(0.0, (saved.bytes - (simgpu.pinned() - pinned)) / GIB)

    one_row = Alternatives(context.spec, context.plan, GPU).parts(MicroBatchShape(1, *LONGEST[name]), SETTING)
    sample_gradient(context, GPU, (sum(one_row.values()) + sum(steps.planned.values())) // 2)
    recovered = [fact for fact in journal.facts if isinstance(fact, OomRecovered)]
    figures["recovered"] = [[fact.micro_batch_before, fact.micro_batch_after] for fact in recovered]
    errors.append(error_of(stepping.measure(1)))

    peak_gib()
    write_result(context, None, TrainResult(model="model", loss=None, first_loss=None, step=context.state.step))
    figures["merge_gib"] = round(peak_gib(), 3)
    figures["result_gib"] = round((run.model / "model.safetensors").stat().st_size / GIB, 3)

    del context, stepping
    torch.cuda.empty_cache()
    context = begin(run, journal, 2)
    assert context.state.step == saved.step, "it resumes where it was saved"
    figures["resume_gib"] = excess_gib(context)
    stepping = Stepping(context, GPU)
    stepping.step()
    errors.append(error_of(stepping.measure(1)))
    figures["max_error"] = max(abs(error) for error in errors)
    return figures


def main(argv: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("qwen", "t5"), nargs="?", default="qwen")
    parser.add_argument("--layers", type=int)
    arguments = parse(parser, argv, model="t5", layers=1)
    if not is_simulated():
        return skipped(arguments, NEEDED)
    task, config, rank = models(arguments.layers)[arguments.model]
    with tempfile.TemporaryDirectory() as home:
        result = measure(Path(home), arguments.model, task, config, rank)
    result["broken"] = [name for name, limit in LIMITS.items() if not result[name] <= limit]
    if not result["recovered"]:
        result["broken"].append("recovered")
    print(json.dumps(result))
    return int(bool(result["broken"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
