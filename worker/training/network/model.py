"""The model: loaded exactly once, guarded, and written out as a folder that `from_pretrained` opens."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from jobs.disk.files import write_synced
from worker.training.machine.usage import process_bytes
from worker.training.models.model_files import CONFIG, GENERATION_CONFIG, SINGLE, SMALL, read_config, validate_folder
from worker.training.network import guards
from worker.training.tasks.task import Config, Task

DTYPE = torch.bfloat16
WEIGHTS = SINGLE
# `from_pretrained` is not thread-safe: in 8 threads it left meta parameters in 199 of 200 models.
_loading = threading.Lock()


@dataclass(frozen=True)
class LoadedModel:
    """A model that passed the guards, with what was measured while it was loaded."""

    task: Task
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    config: Config
    """config.json as it is there."""
    pointers: Mapping[str, int]
    """Address of every parameter as loaded."""
    parameters: int
    parameter_bytes: int
    seconds: float
    peak_ratio: float
    """Peak memory while loading, above what was in use before, / parameter bytes."""

    @property
    def pad_id(self) -> int:
        """Token that pads inputs."""
        return int(self.model.config.pad_token_id or 0)


def load(
    folder: Path, device: torch.device, *, task: Task, dropout: float | None, fused: bool, activation_checkpointing: int
) -> LoadedModel:
    """Load once, in bf16, straight onto `device`; refuse what the guards refuse; then set the job's switches.

    `dropout` None keeps the model's own rate. `activation_checkpointing` n: activations of every n-th layer are
    recomputed in the backward pass (0: of none). None of the three changes what `write_model` writes.
    """
    guards.check_device(device)
    transformers_logging.disable_progress_bar()
    # Before anything is loaded, and because not all of it can be seen afterwards: int8 weights, for one, become bf16
    # without a word, and a torn file raises whatever it likes.
    validate_folder(folder, folder.name, task)
    with _loading:
        # Imports of the architecture, lazily made by transformers, are not the model's memory.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        start = time.perf_counter()
        before = _begin_peak(device)
        model, info = task.auto_class().from_pretrained(
            folder,
            dtype=DTYPE,
            device_map={"": device},
            output_loading_info=True,
            # Mismatched shapes are then reported with the other defects, and refused by name below.
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
        _touch(model)
        peak = _peak(device) - before
        seconds = time.perf_counter() - start
    guards.check_all_loaded(info)
    guards.check_placement(model, DTYPE, device)
    config = read_config(folder, folder.name)
    guards.check_tie(model, task.layout(config), folder)
    for key, value in task.generation(folder).items():
        setattr(model.generation_config, key, value)
    pointers = guards.pointers_of(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    task.configure(model, fused=fused, dropout=dropout)
    if activation_checkpointing:
        # Blocks are counted through encoder and decoder; use_reentrant=False restores the dropout RNG by itself.
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=activation_checkpointing)
    return LoadedModel(
        task=task,
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        config=config,
        pointers=pointers,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=size,
        seconds=seconds,
        peak_ratio=peak / size,
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name → tensor as files hold them: a shared tensor once, under its first name (`shared.weight` for T5)."""
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            named[name] = tensor.detach()
    return named


def write_model(
    loaded: LoadedModel,
    target: Path,
    write_weights: Callable[[Path], object],
    *,
    generation: Mapping[str, object],
    readme: str,
) -> None:
    """Make the folder `target`: weights, config, tokenizer, generation_config.json, README.md; complete, then renamed.

    `write_weights` writes the safetensors file it is given the name of (from the model, or from a checkpoint).
    config.json is the original one: dropout and fused kernels of this job are not part of the model. Two keys are set
    to what is true of the weights: `dtype`, and `tie_word_embeddings`, which transformers 5 saves as true always.
    """
    temporary = target.with_name(f"tmp-{target.name}")
    old = target.with_name(f"tmp-old-{target.name}")
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_weights(temporary / WEIGHTS)
    layout = loaded.task.layout(loaded.config)
    config = {
        **loaded.config,
        "dtype": str(DTYPE).removeprefix("torch."),
        "tie_word_embeddings": loaded.model.get_parameter(layout.head) is loaded.model.get_parameter(layout.embedding),
    }
    config.pop("torch_dtype", None)  # the old name of dtype
    write_synced(temporary / "config.json", json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    for name in SMALL:
        if name not in (CONFIG, GENERATION_CONFIG) and (loaded.folder / name).exists():
            shutil.copyfile(loaded.folder / name, temporary / name)
    write_synced(temporary / GENERATION_CONFIG, json.dumps(generation, indent=2, sort_keys=True).encode() + b"\n")
    write_synced(temporary / "README.md", readme.encode())
    if target.exists():
        os.rename(target, old)
    os.rename(temporary, target)
    shutil.rmtree(old, ignore_errors=True)


# -- measuring -----------------------------------------------------------------------------------------------


def _begin_peak(device: torch.device) -> int:
    """Begin to measure the peak; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM of this process
    return process_bytes("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_bytes("VmHWM")


def _touch(model: nn.Module) -> None:
    # On the CPU weights are mapped lazily: until a page is read it is not resident, and a peak measured before would be
    # a fiction. One element of every 4 KiB is enough.
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.detach().view(-1)[:: 4096 // parameter.element_size()].sum()
