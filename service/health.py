"""Two questions a container engine asks: is the process alive, and can it do its work?"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from jobs.errors import StoreUnavailable
from jobs.store import Store
from service import answers
from service.documented import documented
from service.errors import error_response


def routes(*, store: Store, runs: Path) -> APIRouter:
    """`/health/live` and `/health/ready`."""
    router = APIRouter(prefix="/health", tags=["health"])

    @router.get("/live", response_model=answers.Health, responses=documented(everywhere=(500,)))
    def health_live() -> JSONResponse:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @router.get("/ready", response_model=answers.Health, responses=documented(503, everywhere=(500,)))
    def health_ready() -> JSONResponse:
        """Redis answers and jobs can be written; otherwise 503 whose `param` says which of the two fails."""
        try:
            store.ping()
        except StoreUnavailable:
            return error_response(503, "not_ready", "Redis does not answer", param="redis")
        try:
            with tempfile.NamedTemporaryFile(dir=runs, prefix=".ready-"):
                pass
        except OSError as error:
            message = f"the folder of run directories cannot be written: {os.strerror(error.errno or 0)}"
            return error_response(503, "not_ready", message, param="runs")
        return JSONResponse({"status": "ok"})

    return router
