"""Answers to a file of rows: a line for each, in order. What was killed continues, and ends with the same file.

Beside the file lies `<name>.state` until it is complete: what was asked, so that nothing else continues it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from jobs.answers import Generation
from jobs.data_names import data_format
from longhaul.api import Longhaul
from longhaul.connection import ApiError, RetryPolicy, Unreachable
from longhaul.jobfile import BadInput

AT_ONCE = 16
"""Rows of a request."""
MOST_BYTES = 500_000
"""Of the rows of a request, as they are sent, unless one alone has more."""
LONGEST_ROW = 1_000_000
"""Bytes of one row, as it is sent: the service takes no larger requests."""
TRIES = 3
"""For a request at which the model's process ends, before its rows are sent one by one, and before one is given up."""
OF_A_ROW = ("model_process_ended", "out_of_memory")
"""Codes of errors that a row of the request may have caused."""
BROKEN = "a text in it has half of a surrogate pair, which is no character"
OnAnswer = Callable[[int, Generation], object]


@dataclass(frozen=True)
class PredictionTask:
    """Which rows go to which model, how, and into which file."""

    job: str
    rows: Path
    out: Path
    options: Mapping[str, Any]
    """Keys of `POST /jobs/{job}/generate`, without inputs."""


@dataclass(frozen=True)
class Predictions:
    """What a complete file of answers holds."""

    rows: int
    """Lines of the file."""
    errors: Counter[str]
    """How many lines have this `error`."""

    @property
    def answered(self) -> int:
        """Lines without an `error`."""
        return self.rows - self.errors.total()


def predict(
    api: Longhaul, wanted: PredictionTask, *, on_answer: OnAnswer, on_trouble: Callable[[str], None]
) -> Predictions:
    """Write a line for each row that has none yet. Returns what the file then holds, with the lines of earlier calls.

    `on_answer` is told how many are written, with each answer. An outage of the service is waited for. Raises BadInput,
    ApiError.
    """
    if data_format(wanted.rows.name) not in ("jsonl", None) or wanted.rows.suffix.lower() in (".gz", ".zst"):
        raise BadInput(
            f"{wanted.rows.name} is no file of JSON lines, and `predict` reads no other: write each row as an object "
            "with the columns of the job's data in a line of its own"
        )
    with open(wanted.rows, "rb") as source:
        for _ in _rows(source, wanted.rows):  # a line that is wrong is known before anything is written
            pass
    with open(_state_file(wanted), "a+b") as state:
        try:
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another `longhaul predict` is writing {wanted.out}: give another file with --out"
            ) from None
        try:
            _answer(api, wanted, *_continued(api, wanted, state), on_answer, on_trouble)
            return _predictions(wanted.out)
        except ApiError:  # with nothing written there is nothing to continue, and other options may be accepted
            if not (wanted.out.exists() and wanted.out.stat().st_size):
                wanted.out.unlink(missing_ok=True)
                _state_file(wanted).unlink()
            raise


def _predictions(out: Path) -> Predictions:
    with open(out, "rb") as lines:
        errors = [json.loads(line).get("error") for line in lines]
    return Predictions(len(errors), Counter(error for error in errors if error is not None))


def _answer(
    api: Longhaul,
    wanted: PredictionTask,
    done: int,
    options: Mapping[str, Any],
    on_answer: OnAnswer,
    on_trouble: Callable[[str], None],
) -> None:
    patience = RetryPolicy(on_trouble)
    with open(wanted.rows, "rb") as source, open(wanted.out, "ab") as target:
        for rows in _requests(islice(_rows(source, wanted.rows), done, None)):
            sent = [row for row in rows if not isinstance(row, str)]
            answers = _answers(api, wanted.job, sent, options, patience)
            answer = None
            for row in rows:
                found = row if isinstance(row, str) else next(answers)
                if isinstance(found, str):
                    target.write(_written({"row": done, "text": "", "error": found}))
                else:
                    answer, index = found
                    target.write(_line(done, answer, index))
                done += 1
            target.flush()
            os.fsync(target.fileno())
            if answer is not None:
                on_answer(done, answer)
    _state_file(wanted).unlink()


def _answers(
    api: Longhaul,
    job: str,
    rows: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
    patience: RetryPolicy,
) -> Iterator[tuple[Generation, int] | str]:
    """Of each row the answer that it is in, and its place there; or why it has none. Raises ApiError."""
    tries = 0
    while rows:
        try:
            answer = api.generate(job, {"rows": rows, **options})
            if {output["index"] for output in answer["outputs"]} != set(range(len(rows))):
                raise Unreachable("the answer lacks rows")
        except (ApiError, Unreachable) as error:
            code = error.code if isinstance(error, ApiError) else None
            tries += code in OF_A_ROW
            if code == "input_too_long" or tries == TRIES:
                if len(rows) == 1:
                    yield str(error)
                    return
                for row in rows:
                    yield from _answers(api, job, [row], options, patience)
                return
            patience.trouble(error)
        else:
            patience.well()
            yield from ((answer, index) for index in range(len(rows)))
            return
        patience.pause()


def _continued(api: Longhaul, wanted: PredictionTask, state: BinaryIO) -> tuple[int, dict[str, Any]]:
    """How many rows have their line, and the options, with a seed where something is drawn and a checkpoint by name.

    Removes a torn last line. Raises BadInput where the file is of something else.
    """
    options = dict(wanted.options)
    state.seek(0)
    begun = state.read()
    asked = {"job": wanted.job, "rows_sha256": _sha256(wanted.rows), "options": options}
    if not begun:
        if wanted.out.exists():
            _state_file(wanted).unlink()
            raise BadInput(f"{wanted.out} is there already: remove it, or give another file with --out")
        if options.get("temperature") and "seed" not in options:
            options["seed"] = secrets.randbelow(2**32)
        if options.get("checkpoint") in ("best", "last"):  # another one may be that before all rows are answered
            options["checkpoint"] = _checkpoint(api, wanted)
        state.write(json.dumps({"asked": asked, "options": options}).encode())
        state.flush()
        os.fsync(state.fileno())
        return 0, options
    try:
        before = json.loads(begun)
    except ValueError:  # killed while it was written: there are no answers yet
        before = {"asked": None}
    if before["asked"] != asked:
        raise BadInput(
            f"{wanted.out} was begun with another job, other rows or other options: give those, or remove "
            f"{wanted.out} and {_state_file(wanted).name}"
        )
    if not wanted.out.exists():
        return 0, before["options"]
    with open(wanted.out, "r+b") as target:
        lines = whole = 0
        for line in target:
            if line.endswith(b"\n"):
                lines, whole = lines + 1, whole + len(line)
        target.truncate(whole)
    return lines, before["options"]


def _checkpoint(api: Longhaul, wanted: PredictionTask) -> str:
    """The name of the `best` or the `last` of the job. Raises BadInput."""
    job, given = wanted.job, wanted.options["checkpoint"]
    for each in api.checkpoints(job):
        if given == "last" or each["best"]:
            return each["id"].partition("/")[2]
    _state_file(wanted).unlink()
    raise BadInput(f"job {job} has no {given} checkpoint: `longhaul checkpoints {job}` lists those that it has")


def _state_file(wanted: PredictionTask) -> Path:
    return wanted.out.with_name(f"{wanted.out.name}.state")


def _sha256(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def parsed_row(line: str | bytes) -> Any:
    """JSON, with None for NaN, which pandas writes for a missing value, and for infinity. Raises ValueError."""
    return json.loads(line, parse_constant=lambda _: None, parse_float=_finite)


def _finite(number: str) -> float | None:
    return value if math.isfinite(value := float(number)) else None


def _rows(source: Any, name: Path) -> Iterator[tuple[dict[str, Any] | str, int]]:
    """Each row, or why it cannot be sent, and the bytes that it has when it is. Raises BadInput."""
    for number, line in enumerate(source, start=1):
        if not line.strip():
            continue
        try:
            row = parsed_row(line)
            size = len(json.dumps(row))
        except RecursionError:
            yield "it is nested too deeply", 0
            continue
        except ValueError as error:
            raise BadInput(
                f"{name}, line {number}: it is not JSON ({error}); the file has a JSON object a line"
            ) from None
        if not isinstance(row, dict):
            raise BadInput(f"{name}, line {number}: it is no JSON object, with a key for each column")
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            yield BROKEN, 0
            continue
        if size > LONGEST_ROW:
            yield f"it has {size:,} bytes, and {LONGEST_ROW:,} can be sent", 0
            continue
        yield row, size


def _requests(rows: Iterator[tuple[dict[str, Any] | str, int]]) -> Iterator[Sequence[dict[str, Any] | str]]:
    """As many as one request takes."""
    together: list[dict[str, Any] | str] = []
    size = 0
    for row, length in rows:
        if together and (len(together) == AT_ONCE or size + length > MOST_BYTES):
            yield together
            together, size = [], 0
        together.append(row)
        size += length
    if together:
        yield together


def _line(number: int, answer: Generation, index: int) -> bytes:
    """What does not depend on where and when it was written."""
    found: dict[str, Any] = {"row": number}
    for output in answer["outputs"]:
        if output["index"] == index:
            prefix = "" if output["model"] == "trained" else "base_"
            found |= {f"{prefix}text": output["text"]}
            if output["labels"] is not None:
                found |= {f"{prefix}labels": output["labels"]}
            for key in ("score", "content", "tool_calls"):
                if (value := output.get(key)) is not None:
                    found |= {f"{prefix}{key}": value}
            if output["finish_reason"] == "length":
                found |= {f"{prefix}finish_reason": "length"}
            if output["error"] is not None:
                found |= {"error": output["error"]}
    return _written(found)


def _written(found: Mapping[str, Any]) -> bytes:
    return json.dumps(found, ensure_ascii=False).encode(errors="replace") + b"\n"
