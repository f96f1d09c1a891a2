"""Measured figures of each GPU, beside the runs: `.gpus/<uuid>.json` in the runs directory."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from jobs.disk.files import read_regular, write_atomically
from jobs.measured import MeasuredGpu

log = logging.getLogger("longhaul.measured")
_said: dict[Path, str] = {}
"""Why files cannot be read, as said: a worker reads one at each heartbeat."""


def read_measured(runs: Path, uuid: str, driver: str | None) -> MeasuredGpu | None:
    """What was measured of this GPU with this version of its driver; None: nothing was, or it cannot be read."""
    file = measured_file(runs, uuid)
    try:
        measured = MeasuredGpu.model_validate_json(read_regular(file))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        if _said.get(file) != (why := str(error).splitlines()[0]):
            log.warning(
                "%s cannot be read, so nominal figures are used: %s; `longhaul doctor` writes it", file.name, why
            )
            _said[file] = why
        return None
    return measured if measured.driver == driver else None


def keep_measured(runs: Path, uuid: str, measured: MeasuredGpu) -> None:
    """Replace what was measured before."""
    file = measured_file(runs, uuid)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, measured.model_dump_json(indent=1).encode() + b"\n")


def measured_file(runs: Path, uuid: str) -> Path:
    """With or without the prefix `GPU-`."""
    return runs / ".gpus" / f"{uuid.removeprefix('GPU-')}.json"
