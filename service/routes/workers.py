"""Who works here."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from jobs.store import Store
from service import answers
from service.documented import documented
from service.shapes import list_json


def routes(store: Store) -> APIRouter:
    """`/workers`."""
    router = APIRouter(tags=["workers"])

    @router.get("/workers", response_model=answers.WorkerList, responses=documented())
    def list_workers() -> JSONResponse:
        """Workers heard of in the last minute, with what each reported of itself."""
        return JSONResponse(list_json(store.workers.all(), has_more=False))

    return router
