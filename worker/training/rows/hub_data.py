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
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jobs.data_names import HubData, data_format
from jobs.disk.files import write_synced
from jobs.errors import Rejected
from worker.training.hub_calls import HubRequest, call_with_timeout, watch_download
from worker.training.journal import Journal
from worker.training.rows.sources import DataFile
from worker.training.settings import TrainerSettings
from worker.training.store import require_room

# -- hub splits --------------------------------------------------------------------------------------------------------
# Which files of a hub data set are a split: by the `configs` of its README, else by the hub's naming conventions.

_SYNONYMS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ABOUT = {"config.json", "dataset_info.json", "dataset_infos.json", "metadata.csv", "metadata.jsonl"}
"""Files of known endings that hold no rows."""
_CONVERTED = "refs/convert/parquet"
"""Branch on which the hub keeps a Parquet copy of many data sets, one folder per configuration."""


@dataclass(frozen=True)
class Listing:
    """What the hub says about one commit of a data set."""

    commit: str
    files: Mapping[str, int]
    """Path → bytes."""
    configurations: tuple[Mapping[str, Any], ...] = ()
    """`configs` of its README."""


def files_of_split(listing: Listing, named: HubData, wanted: HubRequest) -> list[str]:
    """Paths of the split's files, in order. Raises Rejected.

    Codes: `needs_script`, `no_data_files`, `several_configurations`, `unknown_configuration`, `unknown_split`,
    `mixed_formats`, `bad_gpu`.
    """
    data = sorted(path for path in listing.files if _holds_rows(path))
    declared = [one for one in listing.configurations if one.get("data_files") or one.get("data_dir")]
    script = named.repository.partition("/")[2] + ".py"
    if script in listing.files and not declared:
        raise wanted.refused(
            "needs_script",
            f"{wanted.name} is made by a script of its own ({script}), and no code of a data set is ever run",
            f"see whether the hub keeps a converted copy: {named.repository}@{_CONVERTED}; or save it as Parquet",
        )
    if not data:
        raise wanted.refused(
            "no_data_files",
            f"{wanted.name} has no file of rows; it has: {_some(listing.files)}",
            "JSON lines, CSV (both also with .gz or .zst) and Parquet are read",
        )
    if declared:
        configuration = _configuration(declared, named, wanted)
        try:
            found = _by_configs(configuration, data)
        except (KeyError, TypeError) as error:
            raise wanted.refused(
                "bad_gpu",
                f"{wanted.name}: its README says {dict(configuration)}, which names no files ({error!r})",
                "download the files that you want into the data directory",
            ) from None
    else:
        found = _by_convention(_files_in_folder(data, named, wanted), named.split)
    chosen = found.get(named.split, [])
    if not chosen:
        raise wanted.refused(
            "unknown_split",
            f"{wanted.name} has no split {named.split!r}; there are: {_some(found)} (files: {_some(data)})",
            f"name one of them: {named.repository}:split",
        )
    formats = {data_format(path): path for path in chosen}
    if len(formats) > 1:
        raise wanted.refused(
            "mixed_formats",
            f"{wanted.name} has this split in several formats: {_some(formats.values())}",
            "download the files that you want into the data directory",
        )
    return chosen


def _holds_rows(path: str) -> bool:
    parts = PurePosixPath(path).parts
    of_rows = data_format(path) not in (None, "workbook", "zip")
    return of_rows and parts[-1] not in _ABOUT and not any(part[0] in "._/" for part in parts)


def _configuration(declared: list[Mapping[str, Any]], named: HubData, wanted: HubRequest) -> Mapping[str, Any]:
    by_name = {str(one.get("config_name", "default")): one for one in declared}
    if named.configuration is not None:
        if named.configuration not in by_name:
            raise _unknown_configuration(by_name, named, wanted)
        return by_name[named.configuration]
    default = [one for name, one in by_name.items() if one.get("default") or name == "default" or len(by_name) == 1]
    if not default:
        raise _several_configurations(by_name, named, wanted)
    return default[0]


def _files_in_folder(data: list[str], named: HubData, wanted: HubRequest) -> list[str]:
    """Without `configs`, a configuration is the folder of that name; without a name, it is everything."""
    folders = sorted({path.partition("/")[0] for path in data if "/" in path})
    if named.configuration is not None:
        inside = [path for path in data if path.startswith(named.configuration + "/")]
        if not inside:
            raise _unknown_configuration(folders, named, wanted)
        return inside
    if named.revision == _CONVERTED and len(folders) > 1:
        raise _several_configurations(folders, named, wanted)
    return data


def _by_configs(configuration: Mapping[str, Any], data: list[str]) -> dict[str, list[str]]:
    """Split → paths, as one of the `configs` says."""
    folder = PurePosixPath(configuration.get("data_dir") or ".")
    inside = [path for path in data if PurePosixPath(path).is_relative_to(folder)]
    entries = configuration.get("data_files")
    if not entries:
        return _by_convention(inside, "train")
    if isinstance(entries, str) or all(isinstance(entry, str) for entry in entries):
        entries = [{"split": "train", "path": entries}]
    found: dict[str, list[str]] = {}
    for entry in entries:
        paths = entry["path"]
        for pattern in [paths] if isinstance(paths, str) else paths:
            matches = _glob(str(folder / pattern))
            found.setdefault(str(entry["split"]), []).extend(path for path in inside if matches.fullmatch(path))
    return {split: sorted(set(paths)) for split, paths in found.items()}


def _by_convention(data: list[str], split: str) -> dict[str, list[str]]:
    """Split → paths that have its name as a word of their own; if none has that of any, all are `train`."""
    words = {**_SYNONYMS} | ({} if split in _SYNONYMS else {split: (split,)})
    found = {
        name: [path for path in data if any(_has_word(path, word) for word in its_words)]
        for name, its_words in words.items()
    }
    found = {name: paths for name, paths in found.items() if paths}
    return found or {"train": data}


def _has_word(path: str, word: str) -> bool:
    edge = r"[/._\- 0-9]"
    return re.search(rf"(?:^|{edge}){re.escape(word.lower())}(?:{edge}|$)", path.lower()) is not None


def _glob(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stay inside a folder, `**` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meaning.get(part) or re.escape(part) for part in parts))


def _several_configurations(names: Iterable[str], named: HubData, wanted: HubRequest) -> Rejected:
    return wanted.refused(
        "several_configurations",
        f"{wanted.name} has several configurations, and none is the default: {_some(names)}",
        f"say which: {named.repository}:configuration/{named.split}",
    )


def _unknown_configuration(names: Iterable[str], named: HubData, wanted: HubRequest) -> Rejected:
    return wanted.refused(
        "unknown_configuration",
        f"{wanted.name}: there is no configuration {named.configuration!r}; there are: {_some(names) or 'none'}",
        f"write {named.repository}:configuration/{named.split}",
    )


def _some(names: Iterable[str]) -> str:
    several = list(names)
    return ", ".join(several[:10]) + (f" and {len(several) - 10} more" if len(several) > 10 else "")


# -- hub data ----------------------------------------------------------------------------------------------------------

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
