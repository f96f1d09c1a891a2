"""Sweeps: many trials of one job; for programs, and as pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response

from jobs import answers
from jobs.sweeps.spec import SweepSpec
from service.answers.conversion import page
from service.edge.body import read_json
from service.jobs.sweeps import Sweeps, sweep_answer, trial_answers
from service.openapi.documented import LOCATION, REPEAT_BODY, SWEEP_BODY, IdempotencyKey, SweepId, documented
from service.pages.render import Renderer
from service.pages.trial_charts import best_first, short_names, trial_charts
from service.routes.jobs import read_if_any
from service.routes.pages import page_routes


def routes(sweeps: Sweeps) -> APIRouter:
    """`/sweeps` and what is done to one of them."""
    router = APIRouter(prefix="/sweeps", tags=["sweeps"])

    @router.post(
        "",
        status_code=202,
        responses=documented(408, 409, 413, 422) | {202: {"headers": LOCATION}},
        openapi_extra=SWEEP_BODY,
    )
    def submit_sweep(
        response: Response, body: Annotated[Any, Depends(read_json)], idempotency_key: IdempotencyKey = None
    ) -> answers.Sweep:
        """A new sweep (202), or the one that this Idempotency-Key and body made before. Each of its trials is a job."""
        sweep = sweeps.submit(body, key=idempotency_key)
        response.headers["Location"] = f"/sweeps/{sweep['id']}"
        return sweep

    @router.get("", responses=documented(422))
    def list_sweeps(
        after: Annotated[str | None, Query(description="Last id of the page before.", max_length=80)] = None,
        limit: Annotated[int, Query(ge=1, le=100, description="Sweeps at most.")] = 20,
    ) -> answers.SweepList:
        """Newest first."""
        found, has_more = sweeps.page(after=after, limit=limit)
        return page(answers.SweepList, found, has_more=has_more, by="id")

    @router.get("/{sweep}", responses=documented(404, 409))
    def get_sweep(sweep: SweepId) -> answers.Sweep:
        """One sweep, with its best trial so far."""
        return sweeps.get(sweep)

    @router.get("/{sweep}/trials", responses=documented(404, 409))
    def list_trials(sweep: SweepId) -> answers.TrialList:
        """All its trials, by number."""
        return page(answers.TrialList, sweeps.trials(sweep), has_more=False)

    @router.get(
        "/{sweep}/trials.csv",
        responses=documented(404, 409)
        | {200: {"description": "A line for each trial.", "content": {"text/csv": {"schema": {"type": "string"}}}}},
        response_class=Response,
    )
    def download_trials(sweep: SweepId) -> Response:
        """All its trials as CSV, with a column for each parameter."""
        name = {"Content-Disposition": f'attachment; filename="{sweep}.csv"'}
        return Response(sweeps.table(sweep), media_type="text/csv", headers=name)

    @router.post("/{sweep}/cancel", responses=documented(404, 409))
    def cancel_sweep(sweep: SweepId) -> answers.Sweep:
        """No more trials; those that are open are cancelled."""
        return sweeps.cancel(sweep)

    @router.post(
        "/{sweep}/repeat",
        status_code=202,
        responses=documented(404, 408, 409, 413, 422) | {202: {"headers": LOCATION}},
        openapi_extra=REPEAT_BODY,
    )
    def repeat_trial(
        sweep: SweepId,
        response: Response,
        body: Annotated[Any, Depends(read_if_any)],
        idempotency_key: IdempotencyKey = None,
    ) -> answers.Sweep:
        """A new sweep that trains the best trial, or another, with other seeds: how much of it was luck."""
        made = sweeps.repeat(sweep, body, key=idempotency_key)
        response.headers["Location"] = f"/sweeps/{made['id']}"
        return made

    @router.delete("/{sweep}", responses=documented(404, 409))
    def delete_sweep(sweep: SweepId) -> answers.DeletedSweep:
        """Remove an ended sweep and the jobs of its trials, with their models and checkpoints, for good."""
        sweeps.delete(sweep)
        return answers.DeletedSweep(id=sweep, object="sweep", deleted=True)

    return router


# -- sweep pages -------------------------------------------------------------------------------------------------------
# Pages of sweeps: their list, and one of them with its trials.

SWEEPS_ON_A_PAGE = 20
TRIALS_ON_A_PAGE = 100
Order = Literal["value", "-value", "number", "-number"]
"""Of the table of trials: best first, worst first, oldest first, newest first."""


def sweep_page_routes(sweeps: Sweeps, render: Renderer) -> APIRouter:
    """`/sweeps` and `/sweeps/{id}`, to be looked at."""
    router = page_routes(render)

    @router.get("/sweeps")
    def sweeps_page(request: Request, after: Annotated[str | None, Query(max_length=80)] = None) -> Response:
        """Newest first."""
        found, has_more = sweeps.page(after=after, limit=SWEEPS_ON_A_PAGE)
        return render.page(request, "sweeps.html", sweeps=found, has_more=has_more, after=after)

    @router.get("/sweeps/{sweep}")
    def sweep_page(
        request: Request, sweep: str, sort: Order = "value", page: Annotated[int, Query(ge=1)] = 1
    ) -> Response:
        """One sweep: the best trial, drawings of all, and a table of them."""
        found = sweeps.find(sweep)
        spec, record = found.spec(), found.record()
        trials = trial_answers(found, record)
        pages = max(1, math.ceil(len(trials) / TRIALS_ON_A_PAGE))
        page = min(page, pages)
        rows = _sorted(spec, trials, sort)[(page - 1) * TRIALS_ON_A_PAGE : page * TRIALS_ON_A_PAGE]
        return render.page(
            request, "sweep.html", sweep=sweep_answer(found, record), trials=rows, charts=trial_charts(spec, trials),
            names=short_names(list(spec.space)), sort=sort, page=page, pages=pages,
            link=lambda **change: f"/sweeps/{sweep}?" + urlencode({"sort": sort, "page": 1} | change),
        )  # fmt: skip

    return router


def _sorted(spec: SweepSpec, trials: Sequence[answers.Trial], sort: Order) -> list[answers.Trial]:
    """Trials without a value are the last by value, newest first."""
    newest_first = list(reversed(trials))
    if sort in ("number", "-number"):
        return newest_first if sort == "-number" else list(trials)
    ranked = best_first(spec, trials)
    known = {trial["number"] for trial in ranked}
    return ranked[:: 1 if sort == "value" else -1] + [trial for trial in newest_first if trial["number"] not in known]
