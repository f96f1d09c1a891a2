"""HTTP in, jobs out: the application, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.middleware import Middleware

from jobs.process.public_url import path_of
from jobs.redis.connection import Tickets, connect
from jobs.redis.feed import Feed
from jobs.redis.gauges import Gauges
from jobs.redis.requests import Answers, Requests
from jobs.redis.store import Store
from jobs.version import VERSION
from service import errors
from service.answers.conversion import UNWORDED
from service.edge.auth import AccessLog, BearerKey, RequestMetrics
from service.edge.body import BodyTimeout
from service.edge.headers import PublicPath, SecurityHeaders
from service.edge.keys import Keys
from service.edge.limits import REFUSALS_PER_S, Buckets, RateLimit
from service.edge.redaction import RedactSecrets
from service.edge.sessions import Sessions
from service.errors import ErrorMiddleware
from service.files.uploads import Uploads
from service.generation.asking import Asking
from service.jobs.actions import Actions
from service.jobs.exports import Exports
from service.jobs.sweeps import Sweeps
from service.openapi import document
from service.pages.render import Renderer, StaticFiles
from service.reading.metric_series import SeriesCache
from service.reading.stream import Streams, frame, unread_frame
from service.routes import (
    comparisons,
    datasets,
    generation,
    health,
    jobs,
    new_job,
    pages,
    results,
    series,
    sign_in,
    sweeps,
)
from service.settings import ServiceSettings


def create_app(settings: ServiceSettings) -> FastAPI:
    """The application. Connects on the first request, so it also starts without Redis.

    ValueError: the file of keys cannot be used.
    """
    keys = Keys(settings.api_key, settings.api_keys_file)
    sessions = Sessions(keys, settings.uploads)
    refusals = Buckets(REFUSALS_PER_S if settings.rate_limit else 0.0)
    client = connect(settings.redis_url)
    store = Store(client)
    actions = Actions(
        runs=settings.runs, data=settings.data, uploads=settings.uploads, store=store, tickets=Tickets(client)
    )
    uploads = Uploads(settings.uploads, most=settings.max_upload_bytes)
    feed = Feed(settings.redis_url, frame, unread_frame)
    streams = Streams(settings.max_streams)
    followed = Answers(settings.redis_url, Requests(client), store.workers)
    kept = SeriesCache()
    asking = Asking(actions, Requests(client), followed, kept)
    exported = Exports(actions, Requests(client))
    swept = Sweeps(actions)
    static = StaticFiles()
    path = path_of(settings.public_url)
    render = Renderer(static, path)
    registry = CollectorRegistry()
    registry.register(UNWORDED)
    registry.register(health.ServiceCollector(Gauges(client), store.workers, streams))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        settings.runs.mkdir(parents=True, exist_ok=True)
        uploads.sweep()
        async with feed:
            yield
        await followed.close()
        client.close()

    app = FastAPI(
        title="Longhaul",
        version=VERSION,
        lifespan=lifespan,
        servers=[{"url": path}] if path else None,
        redirect_slashes=False,
        docs_url=None,  # it loads scripts from another host, as does the next
        redoc_url=None,
        generate_unique_id_function=document.operation_id,
        # A request passes from the first to the last, its answer from the last to the first.
        middleware=[
            Middleware(PublicPath, path=path),
            # Sees every answer, and all of the time that it took.
            Middleware(AccessLog, requests=RequestMetrics(registry)),
            Middleware(SecurityHeaders),  # on every answer: refusals and faults, too
            Middleware(RedactSecrets),  # nothing that is shown gets round it
            Middleware(ErrorMiddleware),  # whatever breaks further inside is answered in the one shape
            Middleware(
                BearerKey, keys=keys, sessions=sessions, refusals=refusals
            ),  # before anything is done for anybody; says whose key it is
            Middleware(RateLimit, per_s=settings.rate_limit),  # counts by that name
            Middleware(BodyTimeout),  # only now somebody may wait for a body
        ],
    )
    errors.install(app)
    document.install(app)
    app.include_router(
        pages.routes(actions, uploads, kept, exported, render, settings.public_url)
    )  # first: they leave to the others what is not theirs
    app.include_router(new_job.routes(actions, uploads, render))
    app.include_router(sweeps.sweep_page_routes(swept, render))
    app.include_router(sign_in.routes(keys, sessions, refusals, render, static, path or "/"))
    app.include_router(jobs.routes(actions))
    app.include_router(sweeps.routes(swept))
    app.include_router(jobs.event_routes(actions, feed, streams, keep_alive_s=settings.keep_alive_s))
    app.include_router(series.series_routes(actions, kept, feed, streams))
    app.include_router(jobs.plan_routes(actions))
    app.include_router(comparisons.comparison_routes(actions, kept))
    app.include_router(results.routes(actions, kept))
    app.include_router(results.export_routes(exported))
    app.include_router(results.report_routes(actions, kept, render))
    app.include_router(generation.routes(actions, asking, streams, keep_alive_s=settings.keep_alive_s))
    app.include_router(datasets.routes(actions, uploads))
    app.include_router(health.worker_routes(store))
    app.include_router(health.prometheus_routes(registry))
    app.include_router(health.routes(store=store, runs=settings.runs, uploads=uploads))
    app.include_router(pages.nowhere(render))  # last: where nothing else is
    return app
