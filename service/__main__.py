"""`python -m service`: the HTTP service, on uvicorn."""

from __future__ import annotations

import os

from jobs.lifeline import PARENT_PID, tie_to_parent

if PARENT_PID in os.environ:  # first of all: nobody outlives its parent (design §2)
    tie_to_parent(int(os.environ[PARENT_PID]))

import logging
import sys

import uvicorn

from service.main import create_app
from service.settings import read_settings


def main() -> int:
    """Read the environment, listen, serve until told to stop."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = read_settings(os.environ)
    except ValueError as error:
        print(f"longhaul service: {error}", file=sys.stderr)
        return 2
    logging.getLogger("longhaul.service").info("%r", settings)
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        # uvicorn's 5 s would close a connection just as a client that asks every 5 s sends its next question.
        timeout_keep_alive=75,
        # Followers of a stream never leave by themselves; they come back with Last-Event-ID.
        timeout_graceful_shutdown=2,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
