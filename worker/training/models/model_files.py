"""A folder with a model, inspected without loading a weight: config.json, tokenizer, headers of the weights."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import _weights_only_unpickler
from torch.serialization import MAGIC_NUMBER

from jobs.errors import BadData, Rejected
from jobs.export import EXPORTS, REPORT, ExportFormat
from jobs.spec import JOB_ID
from worker.training.dataset.slow_tokenizers import FAST, TOKENIZER_CONFIG, VOCABULARIES
from worker.training.models.headers import Stored, damaged, read_header
from worker.training.models.layout import StoredParts, check_tensors
from worker.training.rows.sources import find_path
from worker.training.settings import TrainerSettings
from worker.training.tasks.task import Task

# -- pickles -----------------------------------------------------------------------------------------------------------
# pytorch_model.bin, read as a safetensors file is: which tensors there are, and where their bytes lie.
#
# A pickle is a program. Torch's unpickler for weights runs none of it but what makes tensors; here it makes tensors
# without data (device "meta"), so neither code nor a weight is loaded. Their bytes lie in the file as they are, both
# in the zip archives of today and in the files of torch before 1.6.

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_PROGRAM = re.compile(r"GLOBAL|reduce for|instantiate")
"""In what torch says of a pickle that asks for more than tensors."""


def read_pickle(file: Path, source: str) -> dict[str, Stored]:
    """All tensors of a file that torch.save wrote. A tensor that is shared lies in one place under several names.

    Raises Rejected: `unsafe_pickle` where it asks for more than tensors, `big_endian_pickle` where its numbers are
    not little-endian, `bad_pickle` where it cannot be read. PermissionError is left as it is.
    """
    try:
        return _stored(*(_read_archive if zipfile.is_zipfile(file) else _read_before_1_6)(file, source), file)
    except (PermissionError, MemoryError, Rejected):
        raise
    except Exception as error:  # what a damaged file makes torch raise, it does not say
        lines = [line.strip() for line in str(error).splitlines()]
        # The rest of torch's message tells how to run the program all the same.
        asked = next((line for line in lines if _PROGRAM.search(line)), None)
        if isinstance(error, pickle.UnpicklingError) and asked is not None:
            raise Rejected(
                f"model: {source}: {file.name} holds more than tensors, and pickles can run code: {asked[:200]}",
                code="unsafe_pickle",
                param="model",
                hint="take a file of the weights alone; on the hub, look for a revision with safetensors",
            ) from None
        reason = next((line for line in lines if "Unsupported operand" in line), [*lines, ""][0])
        raise Rejected(
            f"model: {source}: {file.name} cannot be read: {reason[:300]}",
            code="bad_pickle",
            param="model",
            hint="copy it again, completely, or save the model with save_pretrained, which writes safetensors",
        ) from None


def _stored(content: object, ends: Mapping[int, int], file: Path) -> dict[str, Stored]:
    """`ends`: the first byte behind each storage, by its first byte."""
    import torch

    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    found: dict[str, Stored] = {}
    size = file.stat().st_size
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if dtype is None or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"{name} is a {tensor.dtype} of another layout than files of models have")
        storage: Any = tensor.untyped_storage()
        begin = storage._checkpoint_offset + tensor.storage_offset() * tensor.element_size()
        stored = Stored(file, dtype, tuple(tensor.shape), begin, begin + tensor.numel() * tensor.element_size())
        if stored.end > size:
            raise ValueError(f"{size} bytes long instead of {stored.end}")
        if stored.end > ends[storage._checkpoint_offset]:
            raise ValueError(f"{name} is longer than the data stored for it")
        found[str(name)] = stored
    return found


def _read_archive(file: Path, source: str) -> tuple[object, dict[int, int]]:
    """A zip archive of records: a pickle, the order of bytes (not in old files), each storage."""
    import torch

    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed")
    reader: Any = torch._C.PyTorchFileReader(str(file))
    order = reader.get_record("byteorder") if reader.has_record("byteorder") else b"little"
    if order != b"little":  # torch would swap bytes that are not there
        raise Rejected(
            f"model: {source}: the byte order of {file.name} is {order.decode(errors='replace')[:20]!r}, not 'little'",
            code="big_endian_pickle",
            param="model",
            hint=f"write it again with torch, on a machine with an x86 or ARM processor: torch.save(torch.load("
            f"{file.name!r}, weights_only=True), {file.name!r})",
        )
    sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
    begins = {name: reader.get_record_offset(name) for name in sizes if name.startswith("data/")}
    content: object = torch.load(file, map_location="meta", weights_only=True)
    return content, {begin: begin + sizes[name] for name, begin in begins.items()}


def _read_before_1_6(file: Path, source: str) -> tuple[object, dict[int, int]]:
    """Pickles, one behind the other, then the bytes of each storage behind their number."""
    import torch

    storages: dict[str, torch.storage.TypedStorage] = {}
    sizes: dict[str, int] = {}  # those of the storages grow with the tensors that are made of them
    ends: dict[int, int] = {}

    def storage_of(saved: tuple[Any, ...]) -> Any:
        kind, storage_type, key, _, elements, view = saved
        if kind not in ("storage", b"storage") or view is not None:
            raise pickle.UnpicklingError(f"Unsupported storage {kind!r}")
        if key not in storages:
            each: int = torch.empty(0, dtype=storage_type.dtype).element_size()
            sizes[key] = elements * each
            data = torch.UntypedStorage(sizes[key], device="meta")
            storages[key] = torch.storage.TypedStorage(wrap_storage=data, dtype=storage_type.dtype, _internal=True)
        return storages[key]

    with open(file, "rb") as handle:
        if _weights_only_unpickler.load(handle) != MAGIC_NUMBER:
            raise ValueError("it is no file of torch.save")
        for _ in ("protocol", "machine"):
            _weights_only_unpickler.load(handle)
        unpickler: Any = _weights_only_unpickler.Unpickler(handle)
        unpickler.persistent_load = storage_of
        content: object = unpickler.load()
        keys: Any = _weights_only_unpickler.load(handle)
        at = handle.tell()
        for key in keys:
            data = storages[key]._untyped_storage
            data._checkpoint_offset = at + 8  # behind the number of its elements
            at = ends[data._checkpoint_offset] = data._checkpoint_offset + sizes[key]
    return content, ends


# -- model files -------------------------------------------------------------------------------------------------------

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WEIGHTS = ((SINGLE, INDEX), (PICKLE, PICKLE_INDEX))
"""The first of them that a model has."""
SMALL = (
    CONFIG, GENERATION_CONFIG, FAST, TOKENIZER_CONFIG, "special_tokens_map.json",
    "added_tokens.json", "spiece.model", CHAT_TEMPLATE,
)  # fmt: skip
"""Every file but the weights that a model may need, if it has a tokenizer.json."""
_OTHER_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_model_files(config: Mapping[str, Any], files: Iterable[str], source: str) -> list[str]:
    """The weight files (or their index) among `files` of a model; raises Rejected unless all that is needed is there.

    Codes: `remote_code`, `quantized`, `no_tokenizer`, `no_weights`.
    """
    names = set(files)
    _check_code(config, CONFIG, source)
    if config.get("quantization_config"):
        raise _refused(
            "quantized",
            f"{source} is quantized (quantization_config in {CONFIG}): such weights cannot be trained in full",
            "name the model that it was made from",
        )
    if not names.intersection((FAST, *VOCABULARIES)):
        known = f"{FAST}, or a vocabulary as the hub has them: {', '.join(VOCABULARIES)}"
        raise _refused("no_tokenizer", f"{source} has no tokenizer", f"it needs {known}")
    for single, index in _WEIGHTS:
        if single in names:
            return [single]
        first, ending = os.path.splitext(single)
        shards = sorted(name for name in names if name.startswith(f"{first}-") and name.endswith(ending))
        if index in names and shards:
            return [index, *shards]
    others = sorted(name for name in names if name.endswith(_OTHER_PICKLES))
    raise _refused(
        "no_weights",
        f"{source} has neither {SINGLE} nor {PICKLE}" + (f", only {others[0]}" if others else ""),
        "save the model with save_pretrained, which writes safetensors; on the hub, look for a revision that has them",
    )


def small_files(files: Iterable[str]) -> list[str]:
    """Those of a model's files that are needed besides its weights, in order."""
    names = set(files)
    return [name for name in (SMALL if FAST in names else dict.fromkeys((*SMALL, *VOCABULARIES))) if name in names]


def is_weights(name: str) -> bool:
    """Whether a file is one of those that `check_model_files` names."""
    return name in (INDEX, PICKLE_INDEX) or name.endswith((".safetensors", ".bin"))


def read_config(folder: Path, source: str) -> dict[str, Any]:
    """config.json. Raises Rejected (`no_config`); PermissionError is left as it is."""
    return _read_json(folder / CONFIG, source)


def readable_config(folder: Path, source: str) -> dict[str, Any]:
    """config.json of a user's folder. Raises Rejected (`no_config`, `file_unreadable`)."""
    try:
        return read_config(folder, source)
    except PermissionError as error:
        raise _unreadable(error, folder, source) from None


def tokenizer_fingerprint(folder: Path) -> str:
    """sha256 of whatever decides what the tokenizer in a folder makes of a text; nothing is loaded."""
    digest = hashlib.sha256()
    kind = json.loads((folder / CONFIG).read_bytes()).get("model_type")
    digest.update(f"{kind} {version('tokenizers')} {version('transformers')}".encode())
    for name in small_files(os.listdir(folder)):
        if name not in (CONFIG, GENERATION_CONFIG):
            digest.update(name.encode() + hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()


def names_folder(source: str) -> bool:
    """Whether a job's `model` is a folder, in the data directory or of another job; else it is of the hub."""
    return source.startswith(("./", "/")) or is_job(source)


def is_job(source: str) -> bool:
    """Whether a job's `model` is what another job has delivered."""
    return re.fullmatch(JOB_ID, source) is not None


def find_folder(settings: TrainerSettings, source: str) -> Path:
    """The folder of a model inside the data directory, or that of a job.

    Raises Rejected (`path_outside_data`, `model_not_found`, `adapters_alone`).
    """
    if is_job(source):
        return _delivered(settings.runs / source, source)
    try:
        folder = find_path(settings.data, source, "model")
    except BadData as error:
        if error.detail_code != "file_missing":
            raise
        raise Rejected(
            f"model: there is no folder {source} in the data directory",
            code="model_not_found",
            param="model",
            hint="put the model there, or name a hub id without ./ in front",
        ) from None
    if not folder.is_dir():
        raise Rejected(
            f"model: {source} is a file", code="model_not_found", param="model", hint="name the folder that it is in"
        )
    return folder


def _delivered(run: Path, job: str) -> Path:
    folder = run / "model"
    if not folder.is_dir():
        raise Rejected(
            f"model: job {job} has no model" if run.is_dir() else f"model: there is no job {job}",
            code="model_not_found",
            param="model",
            hint="name one that has succeeded: `longhaul list --status succeeded` shows them",
        )
    if not (folder / "adapter_config.json").exists():
        return folder
    merged = run / EXPORTS / ExportFormat.MERGED
    if not (merged / REPORT).exists():
        raise Rejected(
            f"model: job {job} has delivered adapters alone, without the model that they belong to",
            code="adapters_alone",
            param="model",
            hint=f"`longhaul export {job} --to merged` makes the whole model, which is then taken",
        )
    return merged


def validate_folder(folder: Path, source: str, task: Task) -> dict[str, Stored | StoredParts]:
    """The tensors of the model in a folder, by their headers: each once, and exactly those of its config.json.

    Raises Rejected: `no_config`, `bad_config`, `file_unreadable`, and those of `check_model_files`, `weight_files` and
    `check_tensors`.
    """
    try:
        config = read_config(folder, source)
        check_model_files(config, (file.name for file in folder.iterdir()), source)
        if (folder / TOKENIZER_CONFIG).exists():
            _check_code(_read_json(folder / TOKENIZER_CONFIG, source), TOKENIZER_CONFIG, source)
        return check_tensors(read_headers(weight_files(folder, source), source), task.layout(config), source)
    except PermissionError as error:
        raise _unreadable(error, folder, source) from None


def weight_files(folder: Path, source: str) -> list[Path]:
    """The weights of a folder: the single file, or all that the index names; safetensors where there are any.

    Raises Rejected (`bad_safetensors`).
    """
    for single, index in _WEIGHTS:
        if (folder / single).exists():
            return [folder / single]
        if (folder / index).exists():
            return _indexed(folder, index, source)
    raise damaged(source, f"it has neither {SINGLE} nor {PICKLE}")


def _indexed(folder: Path, index: str, source: str) -> list[Path]:
    try:
        named = sorted(set(json.loads((folder / index).read_bytes())["weight_map"].values()))
        files = [folder / name for name in named if Path(name).name == name]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _refused(
            "bad_safetensors", f"{source}: {index} cannot be read: {error}", "take the original file"
        ) from None
    if len(files) < len(named) or not all(file.exists() for file in files):
        missing = next(name for name in named if not (folder / Path(name).name).exists() or Path(name).name != name)
        raise _refused("bad_safetensors", f"{source} lacks {missing}, which its index names", "copy it completely")
    return files


def read_headers(files: Iterable[Path], source: str) -> dict[str, Stored]:
    """All tensors of these files. Raises Rejected as `read_header` and `read_pickle`.

    PermissionError is left as it is.
    """
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in (read_pickle if file.suffix == ".bin" else read_header)(file, source).items():
            if name in found:
                raise damaged(source, f"{name} is in {found[name].file.name} and in {file.name}")
            found[name] = stored
    return found


def _check_code(config: Mapping[str, Any], file: str, source: str) -> None:
    named = config.get("auto_map")
    if named and not _in_transformers(named):
        raise _refused(
            "remote_code",
            f"{source} brings program code of its own (auto_map in {file}: {json.dumps(named)[:200]}), "
            "which is never run, and transformers has no such class",
            "use a model that transformers knows",
        )


def _in_transformers(named: object) -> bool:
    """Whether transformers has all classes of an auto_map, as it has those whose code was published before."""
    import transformers

    each = named.values() if isinstance(named, Mapping) else [named]
    classes = [one for value in each for one in (value if isinstance(value, list) else [value]) if one is not None]
    known = frozenset(dir(transformers))  # names alone: nothing of them is imported
    return all(str(name).rpartition(".")[2] in known for name in classes)


def _read_json(file: Path, source: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except PermissionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise _no_config(source, f"has no readable {file.name}: {error}") from None
    if not isinstance(content, dict):
        raise _no_config(source, f"has a {file.name} that is not a JSON object")
    return {key: _plain(value) for key, value in content.items()}


def _plain(value: Any) -> Any:
    """A value of a config with its infinities as numbers, which transformers writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _plain(each) for key, each in value.items()}


def _no_config(source: str, what: str) -> Rejected:
    return _refused("no_config", f"{source} {what}", "is it the folder of a transformers model? take the original file")


def _unreadable(error: PermissionError, folder: Path, source: str) -> Rejected:
    return _refused(
        "file_unreadable",
        f"{source}: {Path(error.filename or folder).name} cannot be read by the user this runs as (uid {os.geteuid()})",
        f"in the data directory: chmod -R a+rX {source}",
    )


def _refused(code: str, message: str, hint: str) -> Rejected:
    return Rejected(f"model: {message}", code=code, param="model", hint=hint)
