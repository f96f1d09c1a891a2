"""Programs of an engine, such as `sbatch`: run with a time limit, their own words in the error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from jobs.process.secrets import minimal_environment
from jobs.text.printable import printable
from jobs.text.units import format_duration
from worker.engines.engine import EngineRefused, EngineUnavailable

LIMIT_S = 60.0
_OVERRIDES = ("SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SLURM_")
"""Variables that change what Slurm's programs do and say, also against the script, such as SBATCH_EXPORT."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Those by which they find the cluster, and may use it."""


class NoProgram(EngineUnavailable):
    """There is no such program in the PATH."""


def run(command: Sequence[str], given: str = "", *, limit_s: float = LIMIT_S, any_code: bool = False) -> str:
    """What the command prints. `given`: its standard input. Raises EngineRefused if it ends with an error (`any_code`:
    it may), and EngineUnavailable if it is not there or does not end within `limit_s`.
    """
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace",
            env={
                name: value for name, value in minimal_environment(os.environ, ()).items()
                if name in _KEPT or not name.startswith(_OVERRIDES)
            },
        )  # fmt: skip
    except FileNotFoundError:
        raise NoProgram(f"{command[0]} is not in the PATH") from None
    except OSError as error:
        raise EngineUnavailable(f"{command[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise EngineUnavailable(f"{command[0]} did not end within {format_duration(limit_s)}") from None
    if done.returncode and not any_code:
        words = " ".join((done.stderr.strip() or done.stdout.strip()).split())[:300]
        raise EngineRefused(printable(f"{command[0]} ended with code {done.returncode}: {words}"))
    return done.stdout


def ask(command: Sequence[str]) -> str:
    """As `run`, where the engine has nothing to refuse: an error is an outage. Raises EngineUnavailable."""
    try:
        return run(command)
    except EngineRefused as error:
        raise EngineUnavailable(str(error)) from None
