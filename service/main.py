"""HTTP in, jobs out: the application, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from jobs.feed import Feed
from jobs.queue import Tickets
from jobs.store import Store, connect
from service import errors, health
from service.access import AccessLog
from service.actions import Actions
from service.auth import BearerKey
from service.routes import events, jobs, plans, series, workers
from service.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The application. Connects when it is first asked something, so it starts without Redis, too."""
    client = connect(settings.redis_url)
    store = Store(client)
    actions = Actions(runs=settings.runs, data=settings.data, store=store, tickets=Tickets(client))
    feed = Feed(settings.redis_url)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        settings.runs.mkdir(parents=True, exist_ok=True)
        async with feed:
            yield
        client.close()

    app = FastAPI(title="Longhaul", version="0.1.0", lifespan=lifespan, redirect_slashes=False)
    errors.install(app)
    app.add_middleware(BearerKey, key=settings.api_key)
    app.add_middleware(AccessLog)
    app.include_router(jobs.routes(actions))
    app.include_router(events.routes(actions, feed, keep_alive_s=settings.keep_alive_s))
    app.include_router(series.routes(actions))
    app.include_router(plans.routes(actions))
    app.include_router(workers.routes(store))
    app.include_router(health.routes(store=store, runs=settings.runs))
    return app
