"""Two questions a container engine asks: is the process alive, and can it do its work?"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from jobs.disk.writable import probe
from jobs.errors import StoreUnavailable
from jobs.redis.store import Store
from service import answers
from service.errors import error_response
from service.files.uploads import Uploads
from service.openapi.documented import documented


def routes(*, store: Store, runs: Path, uploads: Uploads) -> APIRouter:
    """`/health/live` and `/health/ready`."""
    router = APIRouter(prefix="/health", tags=["health"])

    needs: dict[str, Callable[[], None]] = {"runs": partial(probe, runs), "uploads": uploads.probe}

    @router.get("/live", responses=documented(everywhere=(500,)))
    def health_live() -> answers.Health:
        """The process answers."""
        return answers.Health(status="ok")

    @router.get("/ready", response_model=answers.Health, responses=documented(503, everywhere=(500,)))
    def health_ready() -> answers.Health | JSONResponse:
        """What `POST /jobs` and `PUT /datasets/{name}` need: Redis, the folder of runs and that of uploads take writes.

        Otherwise 503, whose `param` says which of them fails: `redis`, `runs` or `uploads`."""
        try:
            store.ping()
        except StoreUnavailable:
            return error_response(503, "not_ready", "Redis does not answer, or takes no writes", param="redis")
        for param, look in needs.items():
            try:
                look()
            except OSError as error:
                message = f"the folder of {param} cannot be written: {os.strerror(error.errno or 0)}"
                return error_response(503, "not_ready", message, param=param)
        return answers.Health(status="ok")

    return router
