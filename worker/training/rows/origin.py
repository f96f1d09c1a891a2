"""Where rows come from: what `data.train` and `data.validation` name, as files that can be read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from jobs.data_names import UPLOADED, dataset_file, hub_data, is_dataset_name, uploaded_name
from jobs.errors import BadData
from worker.training.journal import Journal
from worker.training.rows.sources import DataFile, RowFile, Source, find_file
from worker.training.settings import TrainerSettings

HEAD_S = 20.0
HEAD_BYTES = 32 << 20
"""Check reads no longer on the hub, and fetches no more from there, than this; the rows so far then have to do."""


READ_S, READ_CHARACTERS = 60.0, 1 << 29
"""Processor time and text of rows for *check*, of all sources together, whatever their files expand to."""


class Allowance:
    """What *check* may read: each of so many readings gets an equal part of what those before it have left."""

    def __init__(self, readings: int = 1) -> None:
        self._readings, self._seconds, self._characters = readings, READ_S, READ_CHARACTERS

    def reading(self) -> Callable[[int], bool]:
        """For one of them, to be asked after each block, of so many characters: whether it has had its part."""
        parts = max(1, self._readings)
        self._readings -= 1
        seconds, characters = self._seconds * (1 - 1 / parts), self._characters - self._characters // parts
        since = time.process_time()

        def spent(read: int) -> bool:
            nonlocal since
            before, since = since, time.process_time()
            self._seconds -= since - before
            self._characters -= read
            return self._seconds <= seconds or self._characters <= characters

        return spent


@dataclass(frozen=True)
class Head:
    """Files of which the first rows are to be read, here or on the hub."""

    name: str
    param: str
    format: str
    files: Sequence[RowFile]
    place: str
    """For the plan: the absolute path of the file, or the name of the hub data set."""
    revision: str | None = None
    """Commit of a hub data set."""
    since: float = field(default_factory=time.monotonic)
    allowance: Allowance = field(default_factory=Allowance)
    digest: str | None = None
    """Of a file here, as of DataFile."""

    @property
    def fetched(self) -> int:
        """Bytes fetched over the network so far. Nothing is fetched twice."""
        return sum(file.fetched for file in self.files)

    @property
    def spent(self) -> bool:
        """Whether the check has fetched as much as it may."""
        return self.fetched >= HEAD_BYTES or time.monotonic() - self.since > HEAD_S


def find_head(
    name: str,
    param: str,
    format: str,
    settings: TrainerSettings,
    commit: str | None = None,
    allowance: Allowance | None = None,
) -> Head:
    """For *check*; nothing but listings is fetched. Raises BadData and Rejected as `_find` and `look_up`.

    `commit`: the one of a hub data set that a run began with; None: what the name stands for now. `allowance`: None: of
    its own.
    """
    allowance = allowance or Allowance()
    if (named := hub_data(name, format)) is None:
        file = _local(_find(name, param, settings), name)
        return Head(name, param, format, [file], str(file.path), allowance=allowance, digest=file.digest(param))
    from worker.training.rows.hub_data import look_up

    dataset = look_up(named, name, param, settings, commit=commit)
    return Head(name, param, format, dataset.head(), name, dataset.listing.commit, allowance=allowance)


def find_source(
    name: str, param: str, format: str, revision: str | None, settings: TrainerSettings, journal: Journal
) -> Source:
    """For *prepare*: all files at hand. `revision` is the commit that check resolved a hub data set to.

    Raises as `find_head`, and DiskFull where a download would not fit.
    """
    if (named := hub_data(name, format)) is None:
        return Source(name, param, format, (_local(_find(name, param, settings), name),))
    from worker.training.rows.hub_data import look_up

    dataset = look_up(named, name, param, settings, commit=revision)
    return Source(name, param, format, tuple(dataset.fetch(journal)), dataset.listing.commit)


def _find(name: str, param: str, settings: TrainerSettings) -> Path:
    """The file that is named: an uploaded data set's, or one of the data directory.

    Raises as `find_file`; BadData (`dataset_missing`) where nothing of that name was uploaded, or it was deleted since.
    """
    if (dataset := uploaded_name(name)) is None:
        try:
            return find_file(settings.data, name, param)
        except BadData as error:
            same = PurePath(name).name
            there = is_dataset_name(same) and dataset_file(settings.uploads, same).is_file()
            if error.detail_code != "file_missing" or not there:
                raise
            hint = f"a file of that name was uploaded: name it {UPLOADED}{same}"
            raise BadData(str(error), code=error.detail_code, param=param, hint=hint) from None
    missing = BadData(
        f"{param}: there is no uploaded data set {dataset!r}",
        code="dataset_missing",
        param=param,
        hint=f"upload it: `longhaul datasets add {dataset}`",
    )
    if not is_dataset_name(dataset):
        raise missing
    try:  # as any file, with the data set's own folder as the place that no link may lead out of
        return find_file(dataset_file(settings.uploads, dataset).parent, dataset, param)
    except BadData as error:
        if error.detail_code != "file_missing":
            raise
        raise missing from None


def _local(path: Path, name: str) -> DataFile:
    return DataFile(path, name, path.stat().st_size)
