"""Data sets on the Hugging Face hub: *check* reads their first rows over HTTP, *prepare* fetches the files of a split.

They are kept in a hub cache of their own (`prepared/hub`): downloads resume, files are shared between revisions, and
what is complete is found without a network. The hub's answer about a revision is kept beside them.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.data_names import HubData
from jobs.disk.files import write_synced
from jobs.errors import Rejected
from worker.training.hub_calls import HubRequest, call_with_timeout, watch_download
from worker.training.journal import Journal
from worker.training.rows.hub_splits import Listing, files_of_split
from worker.training.rows.sources import DataFile
from worker.training.settings import TrainerSettings
from worker.training.store import require_room

LOOKUP_S = 18.0
"""Of one question: check must answer within a minute."""
_PIECE = 1 << 20


@dataclass(frozen=True)
class HubDataset:
    """One split of one commit of a data set."""

    listing: Listing
    paths: tuple[str, ...]
    """Of the split's files in the repository, in order."""
    repository: str
    cache: Path
    wanted: HubRequest

    def head(self) -> list[DataFile] | list[RemoteFile]:
        """The split's files to read the first rows of: at hand if all of them are, else on the hub."""
        from huggingface_hub import hf_hub_url

        if not self.missing():
            return self._at_hand()
        urls = {path: hf_hub_url(self.repository, path, repo_type="dataset", revision=self.listing.commit)
                for path in self.paths}  # fmt: skip
        return [RemoteFile(self._called(path), self.listing.files[path], url, self.wanted)
                for path, url in urls.items()]  # fmt: skip

    def fetch(self, journal: Journal) -> list[DataFile]:
        """The split's files at hand; what is missing is downloaded, if there is room for it (else DiskFull)."""
        from huggingface_hub import snapshot_download

        if missing := self.missing():
            needed = sum(self.listing.files[path] for path in missing)
            require_room(self.cache, needed, self.wanted.name, "LONGHAUL_PREPARED")

            def download() -> Path:
                return Path(
                    snapshot_download(
                        self.repository,
                        repo_type="dataset",
                        revision=self.listing.commit,
                        cache_dir=self.cache,
                        allow_patterns=[glob.escape(path) for path in missing],
                    )
                )

            watch_download(download, _folder(self.cache, self.repository) / "blobs", needed, journal, self.wanted)
            if missing := self.missing():
                raise self.wanted.unreachable(f"{missing[0]} did not arrive in full")
        return self._at_hand()

    def missing(self) -> list[str]:
        """Paths of the files that are not here in full."""
        sizes = {path: self.listing.files[path] for path in self.paths}
        places = {path: self._place(path) for path in self.paths}
        return [path for path, place in places.items() if not place.exists() or place.stat().st_size != sizes[path]]

    def _at_hand(self) -> list[DataFile]:
        return [DataFile(self._place(path), self._called(path), self.listing.files[path]) for path in self.paths]

    def _place(self, path: str) -> Path:
        return _folder(self.cache, self.repository) / "snapshots" / self.listing.commit / path

    def _called(self, path: str) -> str:
        return f"{self.repository}/{path}"


def look_up(named: HubData, name: str, param: str, settings: TrainerSettings, commit: str | None = None) -> HubDataset:
    """What the hub has under a name, or under the commit that it stood for earlier. Fetches kilobytes.

    `name` and `param` are what errors call it. Without a network it must be here in full, or its listing be that of a
    commit. Raises Rejected: `dataset_not_found`, `hub_unreachable`, and those of `files_of_split`.
    """
    wanted = HubRequest("dataset", name, param, "a file in the data directory")
    cache = settings.prepared / "hub"
    folder, revision = _folder(cache, named.repository), commit or named.revision

    def dataset(listing: Listing) -> HubDataset:
        paths = tuple(files_of_split(listing, named, wanted))
        return HubDataset(listing, paths, named.repository, cache, wanted)

    kept = _kept(folder, revision)
    if kept is not None and kept.commit == revision:
        stored = dataset(kept)  # a commit never changes
        if not settings.offline or not stored.missing():
            return stored
    try:
        if settings.offline:
            raise wanted.unreachable("HF_HUB_OFFLINE is set")
        listing = call_with_timeout(LOOKUP_S, lambda: _ask(named.repository, revision), wanted)
    except Rejected as refusal:
        if refusal.detail_code != "hub_unreachable" or kept is None or (stored := dataset(kept)).missing():
            raise
        return stored
    for known_as in {revision, listing.commit}:
        _keep(folder, known_as, listing)
    return dataset(listing)


def _ask(repository: str, revision: str | None) -> Listing:
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(repository, revision=revision, timeout=LOOKUP_S, files_metadata=True)
    metadata: dict[str, Any] = info.card_data.to_dict() if info.card_data is not None else {}  # type: ignore[no-untyped-call]  # the hub's
    files = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
    configurations = tuple(one for one in metadata.get("configs") or () if isinstance(one, dict))
    return Listing(str(info.sha), files, configurations)


def _folder(cache: Path, repository: str) -> Path:
    return cache / f"datasets--{repository.replace('/', '--')}"


def _listing_file(folder: Path, revision: str | None) -> Path:
    return folder / f"listing-{hashlib.sha256((revision or '').encode()).hexdigest()[:24]}.json"


def _keep(folder: Path, revision: str | None, listing: Listing) -> None:
    """Save the hub's answer about a revision."""
    folder.mkdir(parents=True, exist_ok=True)
    file = _listing_file(folder, revision)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    write_synced(temporary, json.dumps([listing.commit, listing.files, listing.configurations]).encode())
    os.replace(temporary, file)


def _kept(folder: Path, revision: str | None) -> Listing | None:
    """The hub's last answer about a revision."""
    try:
        commit, files, configurations = json.loads(_listing_file(folder, revision).read_bytes())
    except FileNotFoundError:
        return None
    return Listing(commit, files, tuple(configurations))


class RemoteFile:
    """A file on the hub, of which only what is read is fetched, a piece at a time; pieces are kept."""

    sha256 = None

    def __init__(self, name: str, size: int, url: str, wanted: HubRequest) -> None:
        self.name, self.bytes = name, size
        self._url, self._wanted = url, wanted
        self._pieces: dict[int, bytes] = {}

    def open(self, param: str) -> io.BufferedReader:
        """The content."""
        return io.BufferedReader(_Ranges(self), _PIECE)

    def state(self) -> object:
        """A commit never changes."""
        return self._url

    @property
    def fetched(self) -> int:
        """Bytes so far."""
        return sum(map(len, self._pieces.values()))

    def piece(self, number: int) -> bytes:
        """Bytes from `number` × 1 MiB on, at most 1 MiB. Raises Rejected (`hub_unreachable`)."""
        if number not in self._pieces:
            self._pieces[number] = call_with_timeout(LOOKUP_S, lambda: self._fetch(number * _PIECE), self._wanted)
        return self._pieces[number]

    def _fetch(self, start: int) -> bytes:
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there, but not in its __all__
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        end = min(start + _PIECE, self.bytes)
        headers = build_hf_headers() | {"range": f"bytes={start}-{end - 1}", "accept-encoding": "identity"}
        with http_stream_backoff("GET", self._url, headers=headers, timeout=LOOKUP_S, max_retries=2) as response:
            hf_raise_for_status(response)
            if start and response.status_code != 206:
                raise self._wanted.unreachable(f"it does not serve parts of {self.name}")
            content = bytearray()
            for some in response.iter_bytes():
                content += some
                if len(content) >= end - start:
                    break
        if len(content) < end - start:
            raise self._wanted.unreachable(f"{self.name} ends after {start + len(content)} bytes")
        return bytes(content[: end - start])


class _Ranges(io.RawIOBase):
    """A remote file as Python's files are."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed: any writable buffer
        if self._at >= self._file.bytes:
            return 0
        number, inside = divmod(self._at, _PIECE)
        some = self._file.piece(number)[inside : inside + len(buffer)]
        buffer[: len(some)] = some
        self._at += len(some)
        return len(some)
