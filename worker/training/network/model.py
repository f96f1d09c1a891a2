"""The model: loaded exactly once, guarded, and written out as a folder that `from_pretrained` opens."""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from jobs.disk.files import replace_folder, write_synced
from jobs.errors import BaseChanged
from worker.training.adapters.method import BaseModel, Full, Method
from worker.training.journal import unfenced
from worker.training.machine.usage import process_bytes
from worker.training.models.manifest import README, SealedFile, describe, write_manifest
from worker.training.models.model_files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    SMALL,
    read_config,
    validate_folder,
)
from worker.training.network import guards
from worker.training.tasks.task import Config, Flops, Task

# `from_pretrained` is not thread-safe: in 8 threads it left meta parameters in 199 of 200 models.
_loading = threading.Lock()
_LENGTHS_AND_TOKENS = ("min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids")


_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
"""What a causal model keeps of its base's. In greedy search none but the last counts, which snippets set to 1."""


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
    """Of the model as it came."""
    parameter_bytes: int
    seconds: float
    peak_ratio: float
    """Peak memory while loading, above what was in use before, / parameter bytes."""
    method: Method = field(default_factory=Full)
    untrained_sha256: str | None = None
    """Hash of the weights that are not trained, as loaded; None: all are."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What is trained, as checkpoints hold it: the tensors themselves."""
        return self.method.weights(self.model)

    def delivered(self, method: Method) -> Mapping[str, torch.Tensor]:
        """What a result by this method holds: a whole model as files of the hub hold it, with experts one by one."""
        weights = method.weights(self.model)
        return self.task.layout(self.config).as_on_the_hub(weights) if method.whole else weights

    @property
    def result_bytes(self) -> int:
        """Of the weights that are delivered."""
        return self.method.result_bytes(sum(parameter.nbytes for parameter in self.trained), self.parameter_bytes)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def trained_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(parameter.numel() for parameter in self.trained)

    @property
    def flops(self) -> Flops:
        """Of training it."""
        return self.method.flops(self.task.flops(self.config), self.trained_parameters, self.task.layout(self.config))

    def check_untrained(self) -> None:
        """Raise BaseChanged unless the weights that are not trained are as they were loaded."""
        if self.method.untrained_sha256(self.model) != self.untrained_sha256:
            raise BaseChanged("the weights that are not trained are no longer those that were loaded")

    @property
    def pad_id(self) -> int:
        """Token that pads inputs."""
        return int(getattr(self.model.config, "pad_token_id", None) or 0)


def load(
    folder: Path,
    device: torch.device,
    *,
    task: Task,
    dropout: float | None,
    fused: bool,
    activation_checkpointing: int,
    method: Method | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load once, as the method's dtype, straight onto `device`; refuse what the guards refuse; set the job's switches.

    `dropout` None keeps the model's own rate. `activation_checkpointing` n: activations of every n-th layer are
    recomputed in the backward pass (0: of none). None of the three changes what `write_model` writes. `method` None:
    every weight is trained. `seed`: of what the method adds to the model.
    """
    method = method or Full()
    guards.check_device(device, method.dtype)
    transformers_logging.disable_progress_bar()
    with _loading:  # whatever builds a model sets torch's default dtype, for the whole process, until it has built it
        # Before anything is loaded, and because not all of it can be seen afterwards: int8 weights, for one, become
        # bf16 without a word, and a torn file raises whatever it likes.
        validate_folder(folder, folder.name, task)
        # Imports of the architecture, lazily made by transformers, are not the model's memory.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        start = time.perf_counter()
        before = _begin_peak(device)
        model, info = task.auto_class().from_pretrained(
            folder,
            dtype=method.dtype,
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
        guards.check_placement(model, method.dtype, device)
        config = read_config(folder, folder.name)
        layout = task.layout(config)
        guards.check_tie(model, layout, folder)
        if (own := task.generation(folder)) is not None:
            model.generation_config = GenerationConfig(**{**generation_settings(model), **own})
        pointers = guards.pointers_of(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        size = sum(parameter.nbytes for parameter in model.parameters())
        task.configure(model, fused=fused, dropout=dropout)
        method.inject(model, seed, layout.head_modules)
    guards.check_not_copied(model, pointers, added=True)
    if activation_checkpointing:
        # Blocks are counted through encoder and decoder; use_reentrant=False restores the dropout RNG by itself.
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=activation_checkpointing)
    return LoadedModel(
        task=task,
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        config=config,
        pointers=guards.pointers_of(model),
        parameters=parameters,
        parameter_bytes=size,
        seconds=seconds,
        peak_ratio=peak / size,
        method=method,
        untrained_sha256=method.untrained_sha256(model),
    )


def generation_settings(model: PreTrainedModel) -> dict[str, object]:
    """What counts of a model's generation_config.json: token ids, and the least length.

    How a base model samples or searches is left out: here it writes greedily, with which those settings may not go.
    """
    found = model.generation_config.to_diff_dict()
    return {key: value for key, value in found.items() if key.endswith("_token_id") or key in _LENGTHS_AND_TOKENS}


def sampling_settings(folder: Path) -> dict[str, object]:
    """How a causal model samples, by the generation_config.json in its folder; empty where that says nothing of it, or
    is missing."""
    try:
        found = json.loads((folder / GENERATION_CONFIG).read_bytes())
    except (OSError, ValueError):  # transformers generates by its defaults then
        return {}
    return {key: found[key] for key in _SAMPLING if key in found} if isinstance(found, dict) else {}


def write_model(
    loaded: LoadedModel,
    target: Path,
    parts: Mapping[str, tuple[Method, Callable[[Path], SealedFile]]],
    *,
    base: BaseModel,
    generation: Mapping[str, object] | None,
    readme: str,
    fence: Callable[[], None] = unfenced,
) -> None:
    """Make the folder `target`: weights, config, tokenizer, generation_config.json, README.md, and manifest.json, which
    says what the others were; complete, then renamed.

    `parts`: by folder within it (`.` first), the method that says what weights and config are there, and what writes
    the safetensors file that it is given the name of (from the model, or from a checkpoint), and knows what is in it.
    `fence` is that of the attempt (`Journal.fence`).
    """
    fence()
    temporary = target.with_name(f"tmp-{target.name}-{uuid.uuid4().hex[:8]}")  # no other attempt writes in it
    temporary.mkdir()
    layout = loaded.task.layout(loaded.config)
    weights: dict[str, SealedFile] = {}
    for part, (method, write_weights) in parts.items():
        fence()
        folder = temporary / part
        folder.mkdir(exist_ok=True)
        weights[(Path(part) / method.weights_file).as_posix()] = write_weights(folder / method.weights_file)
        for name, content in method.configs(loaded.model, loaded.config, layout, base).items():
            write_synced(folder / name, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
    for name in SMALL:
        if name not in (CONFIG, GENERATION_CONFIG) and (loaded.folder / name).exists():
            fence()
            shutil.copyfile(loaded.folder / name, temporary / name)
    if loaded.task.chat_template is not None:
        write_synced(temporary / CHAT_TEMPLATE, loaded.task.chat_template.encode())
    fence()
    if generation is not None:
        write_synced(temporary / GENERATION_CONFIG, json.dumps(generation, indent=2, sort_keys=True).encode() + b"\n")
    write_synced(temporary / README, readme.encode())
    write_manifest(temporary, describe(temporary, weights))
    fence()
    replace_folder(temporary, target)


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
