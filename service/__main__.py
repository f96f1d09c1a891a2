"""`python -m service`: the HTTP service, on uvicorn."""

from __future__ import annotations

import os

from jobs.lifeline import PARENT_PID, tie_to_parent

if PARENT_PID in os.environ:  # first of all: nobody outlives its parent (design §2)
    tie_to_parent(int(os.environ[PARENT_PID]))

import logging
import sys

import uvicorn

from jobs import logs, secrets
from service.connections import LIMITS, make_room
from service.main import create_app
from service.memory import settle
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
    logging.getLogger("longhaul.service").info("%r", settings)
    make_room()
    settle()
    uvicorn.run(app, host=settings.host, port=settings.port, **LIMITS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
