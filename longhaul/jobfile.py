"""What `longhaul submit` sends: a job file, or the job that a file of rows is, with changes from the command line."""

from __future__ import annotations

import codecs
import functools
import json
import os
import re
import shlex
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from jobs.answers import JsonObject
from jobs.data_names import DATA_SUFFIXES, data_format, hub_data, uploaded_name, workbook_suffix
from jobs.spec import NOT_IN_NAMES, JobSpec
from jobs.text.schemas import part, values
from jobs.wrong_spec import json_mistake
from longhaul.api import ApiError, Longhaul
from longhaul.connection import is_loopback
from longhaul.figures import size
from longhaul.transfer import Progress, sha256_of

# -- rows --------------------------------------------------------------------------------------------------------------
# A file of rows that is here: how the service gets to read it.


def at_the_service(
    api: Longhaul,
    file: str,
    *,
    data: Path,
    upload: bool,
    before_upload: Callable[[], None],
    say: Callable[[str], None],
    on_progress: Progress,
) -> str:
    """What `data.train` has to be for the service to read this file; `say` is called with the reason why.

    One in the data directory is read where it lies when the service is on this machine (unless `upload`); any other
    is uploaded, if the service does not have it yet; `before_upload` may raise a reason not to. A file that is not here
    may be there: it goes as it is written.
    """
    if not os.path.exists(file):
        say(f"{file} is not here: the service looks for it {_where(file)}")
        return file
    inside = _inside(file, data)
    if inside is not None and not upload and is_loopback(api.url):
        say(f"{file} is read from the data directory, as {inside} (--upload uploads it instead)")
        return inside
    digest = sha256_of(Path(file)).hex()
    name = dataset_name(os.path.basename(file))
    there = _sha256(api, name)
    if there is not None and there != digest:
        # A data set never changes: other content under a name that is taken gets one of its own.
        stem, dot, suffix = name.partition(".")
        name = f"{stem}-{digest[:8]}{dot}{suffix}"
        there = _sha256(api, name)
    if there == digest:
        say(f"the service already has {file} as dataset:{name}")
    else:
        before_upload()
        api.upload(file, name, on_progress=on_progress)
        say(f"uploaded {file} ({size(os.path.getsize(file))}) as dataset:{name}")
    return f"dataset:{name}"


def _inside(file: str, data: Path) -> str | None:
    path, base = os.path.abspath(file), os.path.abspath(data)
    return os.path.relpath(path, base) if path.startswith(base + os.sep) else None


def _where(name: str) -> str:
    """Where rows of that name are looked for."""
    if uploaded_name(name) is not None:
        return "among the uploaded data sets"
    return "in its data directory" if hub_data(name, "auto") is None else "on the hub"


def dataset_name(name: str) -> str:
    """What a file of that name is called once it is uploaded: the nearest legal name (jobs/data_names.py)."""
    if data_format(name) is None:
        name += ".json"  # rows are recognized under another name only where they are JSON, by the line or in an array
    legal = re.sub(r"[^A-Za-z0-9_.\-]", "-", name)[-100:].lstrip("-_.")
    return f"data.{legal}" if data_format(f".{legal}") and not data_format(legal) else legal  # nothing but the ending


def _sha256(api: Longhaul, name: str) -> str | None:
    """Of a data set of the service; None: there is none."""
    try:
        return str(api.dataset(name)["sha256"])
    except ApiError as error:
        if error.status == 404:
            return None
        raise


# -- jobfile -----------------------------------------------------------------------------------------------------------

ROWS = tuple(suffix for suffix in DATA_SUFFIXES if suffix != ".json")
"""What the name of a file of rows ends in here. One in .json is a job, unless it holds an object a line or an array."""
TYPED = ("method", "task")
"""Parts of a job for which their type may stand: `lora` for `{"type": "lora"}`."""
SQUAD_ROWS = (
    ".data[].paragraphs[] | .context as $context | .qas[] | select(.answers != []) | "
    "{question, context: $context, answers: {text: [.answers[].text]}}"
)
"""For jq: the questions of SQuAD's own files that have an answer, as rows of its hub data set."""
_MINIMUM = {"job": '{"data": {"train": "rows.jsonl"}}', "sweep": '{"job": {…}, "space": {…}}'}
_ROWS_IN = ("data", "rows", "examples")
"""Keys under which an object of JSON holds rows."""
_START = 1 << 16
"""Bytes in which a JSON array begins."""


class BadInput(ValueError):
    """The command line or a file it names cannot be used; says how it could."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def read_job(file: str, changes: Sequence[str], *, rows: Callable[[str], str]) -> JsonObject:
    """The job of a .json file, or the smallest job for a file of rows; then `changes` (`key.dotted=value`) in order.

    `rows` is asked what `data.train` has to be for a file of rows.
    """
    if not file.lower().endswith(ROWS) and (job := object_in(file, "job")) is not None:
        if "space" in job and "job" in job:
            raise BadInput(f"{file} is a sweep, and no job", hint=f"submit it with: longhaul sweep {shlex.quote(file)}")
        return apply_changes(job, changes)
    name = NOT_IN_NAMES.sub("-", Path(file).name.split(".")[0]).lstrip(" -_.")[:64]
    return apply_changes({"name": name or "job", "data": {"train": rows(file)}}, changes)


def apply_changes(job: JsonObject, changes: Sequence[str]) -> JsonObject:
    """The job with `key.dotted=value` set, one after the other. Raises BadInput."""
    for change in changes:
        _set(job, change)
    return job


def takes_text_alone(parts: Sequence[str]) -> bool:
    """Whether this key of a job takes text, and no number."""
    schema = _schema()
    properties: JsonObject = schema["properties"]
    for name in parts[:-1]:
        inner = part(properties.get(name, {}), schema["$defs"])
        if inner is None:
            return parts[:1] == ["metadata"]
        properties = inner["properties"]
    return values(properties.get(parts[-1], {"type": "number"})).startswith("string")


@functools.cache
def _schema() -> JsonObject:
    """Of a job file."""
    return JobSpec.model_json_schema()


def object_in(file: str, kind: Literal["job", "sweep"]) -> JsonObject | None:
    """The job or the sweep in a .json file; None: it holds rows. Raises BadInput."""
    try:
        with open(file, "rb") as handle:  # rows may be gigabytes
            start = handle.read(_START)
            if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                return None
            job = json.loads((start + handle.read()).decode("utf-8-sig"))  # read once: it may be a pipe
    except OSError as error:
        or_rows = " or a file of rows (.jsonl)" if kind == "job" else ""
        raise BadInput(f"{file}: {error.strerror}; give a {kind} file (.json){or_rows}") from None
    except json.JSONDecodeError as error:
        if _is_json_lines(error):
            return None
        raise BadInput(f"{file} is not JSON: {json_mistake(error)}", hint=_rows_hint(file)) from None
    except UnicodeDecodeError:
        raise _packed(file) or BadInput(
            f"{file} is not UTF-8 text; a {kind} file is JSON", hint=_rows_hint(file)
        ) from None
    if (rows := _pandas_rows(job)) is not None:
        turn = f"import json, sys; d = json.load(sys.stdin); print(*map(json.dumps, {rows}), sep=chr(10))"
        raise BadInput(
            f"{file} is no {kind}: it holds rows, as pandas writes them unless told otherwise",
            hint=f"make a file of rows of it: python3 -c {shlex.quote(turn)} < {shlex.quote(file)} > rows.jsonl",
        )
    key = next((each for each in _ROWS_IN if isinstance(job, dict) and isinstance(job.get(each), list)), None)
    if key is not None:
        first = job[key][0] if job[key] else None
        if not isinstance(first, dict) or (job.keys() - {key, "name"}) & JobSpec.model_fields.keys():
            raise BadInput(f"{file}: `data` must be an object; the minimum is {_MINIMUM[kind]}")
        if "paragraphs" not in first:
            return None
        raise BadInput(
            f"{file} is no {kind}: it holds questions about paragraphs, as SQuAD does",
            hint=f"make a file of rows of it: jq -c {shlex.quote(SQUAD_ROWS)} {shlex.quote(file)} > rows.jsonl",
        )
    if not isinstance(job, dict):
        raise BadInput(f"{file}: a {kind} is a JSON object; the minimum is {_MINIMUM[kind]}")
    return job


def _packed(file: str) -> BadInput | None:
    """What to do with a workbook or an archive whose name does not say so; None: it is neither."""
    if not os.path.isfile(file) or not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as packed:
        suffix = workbook_suffix(packed.namelist())
    kind = "an archive" if suffix is None else "a workbook"
    renamed = str(Path(file).with_suffix(suffix or ".zip"))
    return BadInput(
        f"{file} is {kind}, and its name does not say so",
        hint=f"rename it, and submit it again: mv {shlex.quote(file)} {shlex.quote(renamed)}",
    )


def _pandas_rows(value: object) -> str | None:
    """Of an object `d` as DataFrame.to_json writes it (`orient` columns, index or split), its rows in Python; None: it
    is none."""
    if not isinstance(value, dict) or not value:
        return None
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        return "[dict(zip(d['columns'], row)) for row in d['data']]"
    parts = list(value.values())
    if not all(isinstance(part, dict) and part for part in parts):
        return None
    if all(name.isdecimal() for name in value):
        return "d.values()"
    if all(name.isdecimal() for part in parts for name in part):
        return "[{name: d[name].get(row) for name in d} for row in next(iter(d.values()))]"
    return None


def _rows_hint(file: str) -> str | None:
    """For a file that is called neither job nor rows."""
    if file.lower().endswith(".json"):
        return None
    return (
        "if it holds rows, they have to be JSON, CSV, Parquet or a sheet, and its name has to say so: it ends in "
        ".jsonl, .json, .csv, .tsv (each also with .gz or .zst), .parquet, .xlsx, .xls, .ods, or in .zip with one of "
        "these in it"
    )


def _is_json_lines(error: json.JSONDecodeError) -> bool:
    """Whether an object on a line of its own was read, and the next line begins another."""
    first = error.doc[: error.pos].strip()
    another = error.msg == "Extra data" and error.colno == 1 and error.doc[error.pos] == "{"
    return another and first.startswith("{") and "\n" not in first


def split_change(change: str, example: str = "training.epochs=3") -> tuple[list[str], str]:
    """The parts of its key, and what stands behind the sign. Raises BadInput."""
    key, equals, text = change.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise BadInput(f"--set {change}: write key.dotted=value, for example --set {example}")
    return parts, text


def value_of(text: str) -> Any:
    """JSON, or a bare word, which is a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _set(job: JsonObject, change: str) -> None:
    parts, text = split_change(change)
    value = value_of(text)
    if isinstance(value, bool | int | float) and takes_text_alone(parts):
        value = text  # name=2024
    place: JsonObject = job
    at = 0
    while at < len(parts) - 1:
        name, at = parts[at], at + 1
        if place is job and name in TYPED and isinstance(place.get(name), str):
            place[name] = {"type": place[name]}
        inner = place.setdefault(name, {})
        if isinstance(inner, list) and at < len(parts) - 1:  # of sources: the next part is a place in it
            inner, at = _item(inner, parts[at], f"--set {change}: {name}"), at + 1
        if not isinstance(inner, dict):
            raise BadInput(f"--set {change}: {name} is {inner!r} and has no keys")
        place = inner
    place[parts[-1]] = value


def _item(items: list[Any], place: str, of: str) -> JsonObject:
    """One of several sources, as an object."""
    if not (place.isdecimal() and int(place) < len(items)):
        raise BadInput(f"{of} has the places 0 to {len(items) - 1}, and no {place}")
    if isinstance(items[int(place)], str):
        items[int(place)] = {"source": items[int(place)]}
    found: JsonObject = items[int(place)]
    return found
