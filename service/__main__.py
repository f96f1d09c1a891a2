"""`python -m service`: the HTTP service, on uvicorn."""

from __future__ import annotations

import os

from jobs.process.lifeline import PARENT_PID, tie_to_parent

if PARENT_PID in os.environ:  # first of all: nobody outlives its parent (architecture.md: Processes)
    tie_to_parent(int(os.environ[PARENT_PID]))

import logging
import sys

import uvicorn

from jobs.disk.files import unwritable
from jobs.process import logs, secrets
from service.edge.connections import LIMITS, raise_file_limit
from service.main import create_app
from service.memory import tune_memory
from service.settings import read_settings


def main() -> int:
    """Read the environment, listen, serve until told to stop."""
    secrets.register(os.environ)
    try:
        settings = read_settings(os.environ)
        app = create_app(settings)
    except ValueError as error:
        print(f"longhaul service: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log)
    log = logging.getLogger("longhaul.service")
    log.info("%r", settings)
    if (why := unwritable((settings.runs, settings.uploads))) is not None:
        log.error("no job could be taken: %s", why)
        return 2
    raise_file_limit()
    tune_memory()
    uvicorn.run(app, host=settings.host, port=settings.port, **LIMITS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
