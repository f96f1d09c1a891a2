"""Who works here."""

from __future__ import annotations

from fastapi import APIRouter

from jobs.redis.store import Store
from service import answers
from service.openapi.documented import documented


def routes(store: Store) -> APIRouter:
    """`/workers`."""
    router = APIRouter(tags=["workers"])

    @router.get("/workers", response_model_exclude_unset=True, responses=documented())
    def list_workers() -> answers.WorkerList:
        """Workers heard of in the last minute, with what each reported of itself; and jobs that none can work on."""
        workers, damaged = store.workers.all(), store.all_damaged()
        return answers.WorkerList(object="list", data=workers, has_more=False, damaged=damaged)

    return router
