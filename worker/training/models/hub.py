"""Models on the Hugging Face hub: looked up by *check*, fetched by *prepare*, kept in the model store.

Only config, tokenizer and weights (safetensors; where there are none, pytorch_model.bin) are ever fetched. The store is
a hub cache of its own (`models/hub`): downloads resume, files are shared between revisions, and a model that is
complete is found without a network. Weights that were converted are deleted from it; their names stay, so that
the model is still found.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.disk.files import write_atomically
from jobs.errors import Rejected
from worker.training.dataset.slow_tokenizers import VOCABULARIES
from worker.training.hub_calls import HubRequest, call_with_timeout, watch_download
from worker.training.journal import Journal
from worker.training.models.model_files import SMALL, check_model_files, is_weights, read_config, small_files
from worker.training.settings import TrainerSettings
from worker.training.store import require_room

LOOKUP_S = 18.0
"""Check must answer: a hub that takes longer than this counts as unreachable."""


@dataclass(frozen=True)
class HubModel:
    """One commit of one model."""

    repository: str
    commit: str
    config: dict[str, Any]
    files: tuple[str, ...]
    """What will be fetched: config, tokenizer, weights."""
    bytes: int
    """Of these files; 0 where they are already in the store."""


def look_up(model: str, settings: TrainerSettings) -> HubModel:
    """Resolve `org/name[@revision]` to a commit and read its config; at most LOOKUP_S. Fetches kilobytes.

    Raises Rejected: `model_not_found`, `hub_unreachable`, and those of `model_files.check_model_files`.
    """
    repository, _, revision = model.partition("@")
    try:
        if settings.offline:
            raise _wanted(model).unreachable("HF_HUB_OFFLINE is set")
        return call_with_timeout(LOOKUP_S, lambda: _ask(repository, revision or None, settings), _wanted(model))
    except Rejected as refusal:
        away = refusal.detail_code == "hub_unreachable"
        stored = _stored(repository, revision, settings, converted=True) if away else None
        if stored is None:
            raise
        return stored


def fetch(repository: str, commit: str, settings: TrainerSettings, journal: Journal, *, further: int = 0) -> Path:
    """The folder of that commit in the model store, complete; what is missing is downloaded.

    Raises DiskFull before anything is fetched if that and `further` bytes would not fit; Rejected as `look_up`.
    """
    name = f"{repository}@{commit}"
    if (stored := _stored(repository, commit, settings)) is not None:
        return folder_of(stored, settings)
    found = look_up(name, settings)
    from huggingface_hub import snapshot_download

    needed = found.bytes
    store = _store(settings)
    require_room(store, needed + further, f"{name} (download and copy)")

    def download() -> Path:
        files = list(found.files)
        return Path(snapshot_download(repository, revision=commit, cache_dir=store, allow_patterns=files))

    blobs = store / f"models--{repository.replace('/', '--')}" / "blobs"
    return watch_download(download, blobs, needed, journal, _wanted(name))


def _ask(repository: str, revision: str | None, settings: TrainerSettings) -> HubModel:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(repository, revision=revision, timeout=LOOKUP_S, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    small = small_files(sizes)
    # Asked for by name, so that the store learns what the name stands for, and answers for it without a network.
    folder = Path(
        snapshot_download(
            repository, revision=revision or "main", cache_dir=_store(settings), allow_patterns=small, etag_timeout=10
        )
    )
    source = f"{repository}@{folder.name[:12]}"
    config = read_config(folder, source)
    files = (*small, *check_model_files(config, sizes, source))
    return HubModel(repository, folder.name, config, files, sum(sizes[file] for file in files))


def delete_weights(repository: str, commit: str, settings: TrainerSettings) -> None:
    """Delete the downloaded weights of a commit, which were converted, but for those that another commit shares."""
    snapshots = _snapshots(repository, settings)
    weights = sorted(file for file in snapshots.glob(f"{commit}/*") if is_weights(file.name))
    if not weights:
        return
    names = _converted(commit, settings)
    names.parent.mkdir(exist_ok=True)
    write_atomically(names, json.dumps([file.name for file in weights]).encode())
    for file in weights:
        blob = file.resolve()
        file.unlink()
        if not any(other.resolve() == blob for other in snapshots.glob("*/*")):
            blob.unlink(missing_ok=True)


def _converted(commit: str, settings: TrainerSettings) -> Path:
    """What the weights of this commit were called."""
    return _store(settings) / "converted" / f"{commit}.json"


def _stored(repository: str, revision: str, settings: TrainerSettings, *, converted: bool = False) -> HubModel | None:
    """The model, if the store has all of it; `converted`: or had its weights, and now has them converted."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # The library sees to it that the small files are complete; weights are looked at below.
        folder = Path(
            snapshot_download(
                repository,
                revision=revision or "main",
                cache_dir=_store(settings),
                allow_patterns=[*SMALL, *VOCABULARIES],
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    names = [file.name for file in folder.iterdir() if file.exists()]
    if converted and (kept := _converted(folder.name, settings)).exists():
        names += json.loads(kept.read_bytes())
    try:
        config = read_config(folder, repository)
        weights = check_model_files(config, names, repository)
        if len(weights) > 1 and not _shards_complete(weights):
            return None
    except Rejected:
        return None
    return HubModel(repository, folder.name, config, (*small_files(names), *weights), 0)


def _shards_complete(weights: list[str]) -> bool:
    """Whether `model-00001-of-00003.safetensors` has its sisters (the first name is the index)."""
    total = re.search(r"-of-(\d+)\.\w+$", weights[-1])
    return total is not None and len(weights) - 1 == int(total.group(1))


def folder_of(model: HubModel, settings: TrainerSettings) -> Path:
    """Where `look_up` has left its config and tokenizer, and `fetch` its weights."""
    return _snapshots(model.repository, settings) / model.commit


def _snapshots(repository: str, settings: TrainerSettings) -> Path:
    """A folder for each commit."""
    return _store(settings) / f"models--{repository.replace('/', '--')}" / "snapshots"


def _store(settings: TrainerSettings) -> Path:
    return settings.models / "hub"


def _wanted(model: str) -> HubRequest:
    return HubRequest(
        "model",
        model,
        "model",
        "a folder in the data directory (./my-model) or a built-in model such as builtin:t5-tiny",
    )
