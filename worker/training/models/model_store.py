"""The model store: each model as safetensors in bf16 or fp16, made by *prepare*, memory-mapped by every attempt.

    models/<hash>/   model.safetensors  config.json  tokenizer and generation files  manifest.json (bytes, sha256)

The name is a hash of what the model is made from: repository and commit, or the content of a folder's files. What is
already of that type is copied as well, not linked or used in place: there is then one way in, and whatever happens to a
user's folder afterwards does not reach a job that is under way.

fp16 holds numbers up to 65,504, and none below 6e-8. A model with larger weights is refused; smaller ones become 0, and
the manifest says how many.

The converter streams: at no time does it hold more than a piece of one tensor, or one expert of those that files hold
one by one and the store merged, as transformers does; and it maps nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.disk.files import write_synced
from jobs.disk.rundir import RunDir
from jobs.errors import BadData, Rejected
from jobs.export import ExportFormat
from jobs.memory_plan import DType
from jobs.plan import ModelPlan
from worker.training.dataset.conversion import converted, needs_conversion, with_line_breaks, write_general
from worker.training.dataset.tokens import open_tokenizer
from worker.training.journal import Journal
from worker.training.models import hub
from worker.training.models.headers import Stored, damaged
from worker.training.models.layout import StoredParts, reject_tensors
from worker.training.models.manifest import (
    MANIFEST,
    SealedFile,
    delivered,
    describe,
    read_manifest,
    verified_export,
    write_manifest,
)
from worker.training.models.model_files import (
    CONFIG,
    GENERATION_CONFIG,
    SINGLE,
    SMALL,
    find_folder,
    is_job,
    read_config,
    small_files,
    validate_folder,
    weight_files,
)
from worker.training.settings import TrainerSettings
from worker.training.store import fingerprint, make_once, require_room
from worker.training.tasks.task import Task

if TYPE_CHECKING:
    import torch

# -- rounding ----------------------------------------------------------------------------------------------------------
# Floats of a model as the model store holds them, and what cannot be held so.

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""What is converted, as safetensors and as torch names it; everything that is not a float stays as it is."""
STORED: Mapping[DType, str] = {"bfloat16": "BF16", "float16": "F16"}
HALF_BYTES = 2


@dataclass
class Rounding:
    """Floats become numbers of one type; and what this type cannot hold, by tensor."""

    dtype: DType
    overflow: dict[str, float] = field(default_factory=dict)
    """The largest absolute value of a tensor that has such."""
    underflow: dict[str, int] = field(default_factory=dict)
    """How many numbers of a tensor became 0."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """How many numbers of a tensor are NaN or infinite, before float16 or in bfloat16."""

    def bytes_of(self, name: str, numbers: torch.Tensor) -> memoryview:
        """Of a piece of this tensor, rounded to the nearest (ties to even)."""
        import torch

        rounded = numbers.to(getattr(torch, self.dtype))
        held = numbers if self.dtype == "float16" else rounded  # what float16 cannot hold is told apart
        if broken := held.numel() - int(torch.count_nonzero(torch.isfinite(held))):
            self.not_finite[name] = self.not_finite.get(name, 0) + broken
        if self.dtype == "float16" and numbers.dtype != torch.float16:
            beyond = numbers[torch.isinf(rounded) & torch.isfinite(numbers)]
            if len(beyond):
                self.overflow[name] = max(self.overflow.get(name, 0.0), float(beyond.abs().max()))
            if lost := int(torch.count_nonzero(numbers) - torch.count_nonzero(rounded)):
                self.underflow[name] = self.underflow.get(name, 0) + lost
        content: memoryview = rounded.reshape(-1).view(torch.uint8).numpy().data
        return content

    def refuse(self, source: str) -> None:
        """Raise Rejected (`weights_not_finite`, `weights_overflow`), naming tensors, where a model cannot be stored."""
        reject_tensors(
            "weights_not_finite",
            [f"{name} ({count:,} values)" for name, count in self.not_finite.items()],
            f"of {source} have values that are NaN, or infinite in {self.dtype}",
            hint="the files are damaged, or were published so: get them again, or take another revision or model",
        )
        reject_tensors(
            "weights_overflow",
            [f"{name} (up to {largest:,.0f})" for name, largest in self.overflow.items()],
            f"of {source} have values beyond 65,504, the largest of float16",
            hint="set method.base_dtype: bfloat16, for which a GPU must have compute capability 8.0 or newer (RTX 30, "
            "A100, and newer)",
        )


# -- model store -------------------------------------------------------------------------------------------------------

VERSION = 1
"""Goes up whenever the same source would give other files."""
PIECE = 1 << 26
"""Bytes of a tensor in memory at a time."""
_SYNC_EVERY = 1 << 30
"""Written this far ahead of the disk at most, so that progress is real and other writers are not stalled."""


def stored_model(
    plan: ModelPlan,
    settings: TrainerSettings,
    task: Task,
    journal: Journal,
    *,
    dtype: DType = "bfloat16",
    seed: int = 0,
    thorough: bool = False,
) -> Path:
    """The store's folder of a hub id's commit or of a user's folder; made now unless it is there and undamaged.

    `dtype`: of its floats. `seed`: of what begins at random.

    Raises Rejected as `validate_folder`, `convert` and `hub.fetch` do, and DiskFull before anything is written that
    would not fit.
    """
    facts = [*task.model_facts(seed), *([] if dtype == "bfloat16" else [dtype])]
    if plan.revision is not None:
        repository = plan.source.partition("@")[0]
        folder = settings.models / _hash(["hub", VERSION, repository, plan.revision, *facts])

        def make(target: Path) -> None:
            further = HALF_BYTES * plan.parameters
            source = hub.fetch(repository, str(plan.revision), settings, journal, further=further)
            convert(source, target, f"{repository}@{plan.revision}", task, journal, seed, dtype)
    else:
        source = find_folder(settings, plan.source)
        validate_folder(source, plan.source, task)
        if is_job(plan.source):
            job = RunDir(settings.runs / plan.source)
            if source == job.model:
                delivered(job, journal.progress)
            else:
                verified_export(job, ExportFormat.MERGED, journal.progress)
        before = _state_of(source, plan.source)
        content = {name: fingerprint(source / name, journal.progress) for name in before}
        folder = settings.models / _hash(["folder", VERSION, content, *facts])

        def make(target: Path) -> None:
            convert(source, target, plan.source, task, journal, seed, dtype)
            if _state_of(source, plan.source) != before:
                raise Rejected(
                    f"model: {plan.source} changed while it was copied",
                    code="model_changed",
                    param="model",
                    hint="submit again when it is complete",
                )

    make_unless_there(folder, make, task, journal, thorough=thorough)
    if plan.revision is not None and not settings.keep_downloads:
        hub.delete_weights(plan.source.partition("@")[0], plan.revision, settings)
    return folder


def make_unless_there(
    folder: Path, make: Callable[[Path], None], task: Task, journal: Journal, *, thorough: bool
) -> None:
    """`make` a folder of the store unless it is there and undamaged. `thorough`: what is there is read whole."""

    def usable(folder: Path) -> bool:
        return damage(folder, task, thorough=thorough, progress=journal.progress) is None

    make_once(folder, make, usable, waiting=journal.progress)


def convert(
    source: Path, target: Path, name: str, task: Task, journal: Journal, seed: int = 0, dtype: DType = "bfloat16"
) -> None:
    """Write the model in `source` in that type into the empty folder `target`: one file of weights, whatever it was.

    `config.json` becomes what the task makes of it, and gets the dtype, and in `tie_word_embeddings` the truth about
    the head. A tokenizer without tokenizer.json gets one; where the task keeps line breaks, it
    gets a token for them. Tensors that the task adds begin at random values, by `seed`.

    Raises Rejected where weights are NaN or infinite (`weights_not_finite`), or float16 cannot hold them
    (`weights_overflow`).
    """
    tensors = validate_folder(source, name, task)
    config = {**task.adapted(read_config(source, name))}
    layout = task.layout(config)
    config.pop("torch_dtype", None)  # the old name of dtype
    config.pop("auto_map", None)  # code that is not run, and not copied
    config |= {"dtype": dtype, "tie_word_embeddings": layout.tied}
    new = task.initialized(config, layout.shapes.keys() - tensors.keys() - set(layout.optional), seed)
    require_room(target, sum(_bytes(stored) for stored in tensors.values()), f"{name} (copy in {dtype})")
    tokenizer = with_line_breaks(open_tokenizer(source)) if task.keeps_line_breaks else None
    if tokenizer is None and needs_conversion(source):
        tokenizer = converted(source)
    if tokenizer is not None:
        write_general(tokenizer, target)
        kept = [GENERATION_CONFIG]
    else:
        kept = [small for small in SMALL if small != CONFIG]
    for small in kept:
        if (source / small).exists():
            write_synced(target / small, (source / small).read_bytes())
    write_synced(target / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode() + b"\n")
    rounding = Rounding(dtype)
    weights = _write_weights(target / SINGLE, tensors, new, name, journal, rounding)
    rounding.refuse(name)
    seal(target, name, {SINGLE: weights}, new=sorted(new), underflow=rounding.underflow)


def new_tensors(folder: Path) -> tuple[str, ...]:
    """Names of the tensors in a folder of the store that the model it was made from does not have."""
    return tuple(json.loads((folder / MANIFEST).read_bytes()).get("new", ()))


def underflow(folder: Path) -> Mapping[str, int]:
    """How many weights of a folder of the store are 0 because they are too small for its type, by tensor."""
    counted: dict[str, int] = json.loads((folder / MANIFEST).read_bytes()).get("underflow", {})
    return counted


def seal(
    folder: Path,
    source: str,
    known: Mapping[str, SealedFile] = {},
    *,
    new: Sequence[str] = (),
    underflow: Mapping[str, int] = {},
) -> None:
    """Write the manifest of all files in `folder`: bytes and sha256, computed unless `known`; of `new` tensors, and of
    those with weights that became 0."""
    facts: dict[str, object] = {"new": list(new)} if new else {}
    facts |= {"underflow": dict(underflow)} if underflow else {}
    write_manifest(folder, describe(folder, known), version=VERSION, source=source, **facts)


def check_files(folder: Path, progress: Callable[[], object], *, weights: bool) -> None:
    """Raise BadData (`model_damaged`) if a file of the store is gone, or its content has changed.

    Without `weights` those are only looked for, not read. `progress` is called at every 8 MiB.
    """
    files: Mapping[str, SealedFile | None]
    try:
        files = read_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError):
        files = {CONFIG: None, SINGLE: None}  # what every model has
    for name, entry in files.items():
        try:
            (folder / name).stat()
            if entry and (weights or name != SINGLE) and fingerprint(folder / name, progress) != entry["sha256"]:
                raise BadData(f"the content of {folder / name} has changed", code="model_damaged")
        except OSError as error:
            raise BadData(str(error), code="model_damaged") from error


def damage(
    folder: Path, task: Task, *, thorough: bool = False, progress: Callable[[], object] = lambda: None
) -> str | None:
    """What is wrong with a folder of the store, or None.

    Sizes and headers; if `thorough`, every byte (`progress` is called meanwhile).
    """
    try:
        files = read_manifest(folder)
        for name, entry in files.items():
            if (size := (folder / name).stat().st_size) != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if thorough and fingerprint(folder / name, progress) != entry["sha256"]:
                return f"{name} is damaged: its sha256 has changed"
        validate_folder(folder, folder.name, task)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Rejected) as error:
        return str(error)
    return None


def _state_of(folder: Path, source: str) -> dict[str, tuple[int, ...]]:
    """Name → size and times of change, of every file that the model is made from."""
    names = small_files(os.listdir(folder))
    names += [file.name for file in weight_files(folder, source)]
    found = {name: (folder / name).stat() for name in names}
    return {name: (status.st_size, status.st_mtime_ns, status.st_ctime_ns) for name, status in found.items()}


def _write_weights(
    file: Path,
    tensors: Mapping[str, Stored | StoredParts],
    new: Mapping[str, torch.Tensor],
    source: str,
    journal: Journal,
    rounding: Rounding,
) -> SealedFile:
    """A safetensors file of these tensors and then the `new` ones, synced; returns its bytes and sha256."""
    # In the order of the source, so that a disk reads on and on.
    ordered = sorted(tensors.items(), key=lambda entry: entry[1].place)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    size = 0
    for name, stored in ordered:
        dtype = STORED[rounding.dtype] if stored.dtype in FLOATS else stored.dtype
        header[name] = {"dtype": dtype, "shape": stored.shape, "data_offsets": [size, size + _bytes(stored)]}
        size += _bytes(stored)
    for name, tensor in new.items():
        header[name] = {
            "dtype": STORED[rounding.dtype], "shape": list(tensor.shape),
            "data_offsets": [size, size + HALF_BYTES * tensor.numel()],
        }  # fmt: skip
        size += HALF_BYTES * tensor.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    start = len(text).to_bytes(8, "little") + text
    digest, written, synced = hashlib.sha256(start), len(start), 0
    with open(file, "wb", buffering=0) as handle:
        handle.write(start)
        added = (rounding.bytes_of(name, tensor) for name, tensor in new.items())
        for pieces in (*(_pieces(name, stored, source, rounding) for name, stored in ordered), added):
            for piece in pieces:
                digest.update(piece)
                written += handle.write(piece)
                if written - synced >= _SYNC_EVERY:
                    os.fdatasync(handle.fileno())
                    synced = written
                journal.progress(written / (len(start) + size))
        os.fsync(handle.fileno())
    return {"bytes": written, "sha256": digest.hexdigest()}


def _pieces(name: str, stored: Stored | StoredParts, source: str, rounding: Rounding) -> Iterator[memoryview]:
    """The bytes of a tensor as they are stored, rounded where they are floats of another type."""
    if isinstance(stored, Stored):
        for view in _read(stored, source, PIECE):
            yield rounding.bytes_of(name, _numbers(view, stored)) if stored.dtype in FLOATS else view
        return
    for group, parts in enumerate(stored.merged.groups):
        each = {part: stored.parts[part] for part in parts.values()}
        numbers = {
            part: _numbers(next(_read(found, source, found.end - found.begin)), found).view(found.shape)
            for part, found in each.items()
        }
        yield rounding.bytes_of(name, stored.merged.join(group, numbers).reshape(-1))


def _read(stored: Stored, source: str, piece: int) -> Iterator[memoryview]:
    """The bytes of a tensor as they are, so many at a time, in the same buffer."""
    buffer = bytearray(min(piece, stored.end - stored.begin))
    with open(stored.file, "rb", buffering=0) as handle:
        handle.seek(stored.begin)
        left = stored.end - stored.begin
        while left:
            view = memoryview(buffer)[: min(piece, left)]
            filled = 0
            while filled < len(view):
                if not (got := handle.readinto(view[filled:])):
                    raise damaged(source, f"{stored.file.name} became shorter while it was read")
                filled += got
            left -= len(view)
            yield view


def _numbers(view: memoryview, stored: Stored) -> torch.Tensor:
    """[n] that these bytes of a tensor are."""
    import torch

    return torch.frombuffer(view, dtype=getattr(torch, FLOATS[stored.dtype]))


def _bytes(stored: Stored | StoredParts) -> int:
    """Of a tensor once it is in the store."""
    if isinstance(stored, StoredParts) or stored.dtype in FLOATS:
        return HALF_BYTES * stored.elements
    return stored.end - stored.begin


def _hash(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
