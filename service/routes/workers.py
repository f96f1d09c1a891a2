"""Who works here."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from jobs.store import Store
from service.shapes import list_json


def routes(store: Store) -> APIRouter:
    """`/workers`."""
    router = APIRouter(tags=["workers"])

    @router.get("/workers")
    def workers() -> JSONResponse:
        """Workers heard of in the last minute, with what each reported of itself."""
        return JSONResponse(list_json(store.workers(), has_more=False))

    return router
