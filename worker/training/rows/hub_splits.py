"""Which files of a hub data set are a split: by the `configs` of its README, else by the hub's naming conventions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from jobs.data_names import HubData, data_format
from jobs.errors import Rejected
from worker.training.hub_calls import HubRequest

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
