"""Models on the Hugging Face hub: looked up by *check*, fetched by *prepare*, kept in the model store.

Only config, tokenizer and safetensors are ever fetched. The store is a hub cache of its own (`models/hub`): downloads
resume, files are shared between revisions, and a model that is complete is found without a network.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from jobs.errors import Refused
from worker.training.journal import Journal
from worker.training.model_files import SINGLE, SMALL, read_config, refuse_unusable
from worker.training.settings import TrainerSettings
from worker.training.store import require_room

LOOKUP_S = 18.0
"""Check must answer: a hub that takes longer than this counts as unreachable."""
_POLL_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class HubModel:
    """One commit of one model."""

    repository: str
    commit: str
    config: dict[str, Any]
    files: tuple[str, ...]
    """What will be fetched: config, tokenizer, safetensors."""
    bytes: int
    """Of these files; 0 where they are already in the store."""


def look_up(model: str, settings: TrainerSettings) -> HubModel:
    """Resolve `org/name[@revision]` to a commit and read its config; at most LOOKUP_S. Fetches kilobytes.

    Raises Refused: `model_not_found`, `hub_unreachable`, and those of `model_files.refuse_unusable`.
    """
    repository, _, revision = model.partition("@")
    try:
        if settings.offline:
            raise _unreachable(model, "HF_HUB_OFFLINE is set")
        return _within(LOOKUP_S, lambda: _ask(repository, revision or None, settings), model)
    except Refused as refusal:
        if refusal.detail_code != "hub_unreachable" or (stored := _stored(repository, revision, settings)) is None:
            raise
        return stored


def fetch(repository: str, commit: str, settings: TrainerSettings, journal: Journal, *, further: int = 0) -> Path:
    """The folder of that commit in the model store, complete; what is missing is downloaded.

    Raises DiskFull before anything is fetched if that and `further` bytes would not fit; Refused as `look_up`.
    """
    name = f"{repository}@{commit}"
    if (stored := _stored(repository, commit, settings)) is not None:
        return _folder(stored, settings)
    found = look_up(name, settings)
    from huggingface_hub import snapshot_download

    needed = found.bytes
    store = _store(settings)
    require_room(store, needed + further, f"{name} (download and bf16 copy)")

    def download() -> Path:
        files = list(found.files)
        return Path(snapshot_download(repository, revision=commit, cache_dir=store, allow_patterns=files))

    blobs = store / f"models--{repository.replace('/', '--')}" / "blobs"
    return _watched(download, blobs, needed, journal, name)


def _ask(repository: str, revision: str | None, settings: TrainerSettings) -> HubModel:
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi().model_info(repository, revision=revision, timeout=LOOKUP_S, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    small = [name for name in sizes if name in SMALL]
    # Asked for by name, so that the store learns what the name stands for, and answers for it without a network.
    folder = Path(
        snapshot_download(
            repository, revision=revision or "main", cache_dir=_store(settings), allow_patterns=small, etag_timeout=10
        )
    )
    source = f"{repository}@{folder.name[:12]}"
    config = read_config(folder, source)
    files = (*small, *refuse_unusable(config, sizes, source))
    return HubModel(repository, folder.name, config, files, sum(sizes[file] for file in files))


def _stored(repository: str, revision: str, settings: TrainerSettings) -> HubModel | None:
    """The model, if the store has all of it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # The library sees to it that the small files are complete; weights are looked at below.
        folder = Path(
            snapshot_download(
                repository,
                revision=revision or "main",
                cache_dir=_store(settings),
                allow_patterns=list(SMALL),
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    names = [file.name for file in folder.iterdir()]
    try:
        config = read_config(folder, repository)
        weights = refuse_unusable(config, names, repository)
        if weights != [SINGLE] and not _shards_complete(weights):
            return None
    except Refused:
        return None
    return HubModel(repository, folder.name, config, (*(name for name in names if name in SMALL), *weights), 0)


def _shards_complete(weights: list[str]) -> bool:
    """Whether `model-00001-of-00003.safetensors` has its sisters (the first name is the index)."""
    total = re.search(r"-of-(\d+)\.safetensors$", weights[-1])
    return total is not None and len(weights) - 1 == int(total.group(1))


def _folder(model: HubModel, settings: TrainerSettings) -> Path:
    return _store(settings) / f"models--{model.repository.replace('/', '--')}" / "snapshots" / model.commit


def _store(settings: TrainerSettings) -> Path:
    return settings.models / "hub"


def _within(seconds: float, call: Callable[[], T], model: str) -> T:
    """The call's result, or its error in our words; `hub_unreachable` if it takes longer."""
    done = _Outcome(call)
    done.thread.join(seconds)
    if done.thread.is_alive():
        raise _unreachable(model, f"no answer within {seconds:.0f} s")
    return done.result(model)


def _watched(call: Callable[[], Path], growing: Path, total: int, journal: Journal, model: str) -> Path:
    """A download's result. Progress is told when bytes have come in, and only then."""
    done, before = _Outcome(call), -1
    while done.thread.is_alive():
        done.thread.join(_POLL_S)
        now = sum(file.stat().st_size for file in growing.glob("*")) if growing.exists() else 0
        if now != before:
            journal.progress(min(1.0, now / total) if total else None)
            before = now
    return done.result(model)


class _Outcome(Generic[T]):
    """Runs a call in a daemon thread: the hub's client has no deadline over all its retries."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except Exception as error:
            self._error = error

    def result(self, model: str) -> T:
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
        from huggingface_hub.errors import RevisionNotFoundError as NoRevision

        error = self._error
        if error is None:
            return cast(T, self._value)
        if isinstance(error, Refused) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise error
        if isinstance(error, GatedRepoError):
            hint = "accept its terms on the hub and put a token with read access in HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            hint = (
                "check the spelling (org/name); for a private model put a token in HF_TOKEN; a folder is written ./name"
            )
        elif isinstance(error, NoRevision | HFValidationError):
            hint = "write org/name, or org/name@revision with a branch, tag or commit of that model"
        else:
            # Whatever HTTP, TLS or name resolution may raise: the client's own library is not ours to import.
            raise _unreachable(model, f"{type(error).__name__}: {error}") from error
        raise Refused(
            f"model: the hub has no {model} for us: {str(error).splitlines()[0]}",
            code="model_not_found",
            param="model",
            hint=hint,
        ) from error


def _unreachable(model: str, why: str) -> Refused:
    return Refused(
        f"model: {model} is not in the model store, and the hub cannot be asked for it: {why}",
        code="hub_unreachable",
        param="model",
        hint="check the network, or use a folder in the data directory (./my-model) or builtin:t5-tiny",
    )
