"""Pages of sweeps: their list, and one of them with its trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response

from jobs.sweeps.spec import SweepSpec
from service import answers
from service.jobs.sweeps import Sweeps, sweep_answer, trial_answers
from service.pages.render import Renderer
from service.pages.trial_charts import best_first, short_names, trial_charts
from service.routes.pages import page_routes

SWEEPS_ON_A_PAGE = 20
TRIALS_ON_A_PAGE = 100
Order = Literal["value", "-value", "number", "-number"]
"""Of the table of trials: best first, worst first, oldest first, newest first."""


def routes(sweeps: Sweeps, render: Renderer) -> APIRouter:
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
    known = {trial.number for trial in ranked}
    return ranked[:: 1 if sort == "value" else -1] + [trial for trial in newest_first if trial.number not in known]
