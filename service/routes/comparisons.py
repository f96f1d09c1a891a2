"""Jobs side by side."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query

from jobs.comparison.answer import FEWEST, MOST, Comparison
from jobs.comparison.compare import compare
from jobs.comparison.facts import JobFacts
from jobs.disk.rundir import RunDir
from jobs.errors import Damaged, NewerFormat, NotFound, UserError
from service.jobs.actions import Actions
from service.openapi.documented import COMPARED_JOBS, documented
from service.reading.metric_series import SeriesCache


def comparison_routes(actions: Actions, kept: SeriesCache) -> APIRouter:
    """`/compare`."""
    router = APIRouter(tags=["comparisons"])

    @router.get("/compare", responses=documented(404, 409, 422), openapi_extra={"parameters": [COMPARED_JOBS]})
    def compare_jobs(jobs: Annotated[str, Query(max_length=2000, include_in_schema=False)] = "") -> Comparison:
        """Only what differs between jobs: their rows, models, memory, settings, versions, GPUs, and what came of them.

        Of each difference, how many bytes of the predicted peak and how much time it costs, where the plans say so.
        Where memory did not suffice for one job and did for another, `causes` say why.
        """
        return comparison_of(actions, kept, jobs)

    return router


def comparison_of(actions: Actions, kept: SeriesCache, jobs: str) -> Comparison:
    """Of the jobs with these ids, with commas between. Raises UserError, NotFound, Damaged."""
    return compare([_facts(actions.run(job), kept) for job in _ids(jobs)])


def _ids(given: str) -> list[str]:
    """Two to ten ids. Raises UserError."""
    ids = [job for each in given.split(",") if (job := each.strip())]
    if not FEWEST <= len(ids) <= MOST:
        raise UserError(
            f"jobs names {len(ids)} job{'' if len(ids) == 1 else 's'}: {FEWEST} to {MOST} can be compared",
            param="jobs",
            hint="name more than one: `longhaul compare JOB JOB`, or /compare?jobs=JOB,JOB in a browser"
            if len(ids) < FEWEST
            else "name fewer",
        )
    if twice := [job for job in dict.fromkeys(ids) if ids.count(job) > 1]:
        raise UserError(f"jobs names {twice[0][:80]} twice: a job does not differ from itself", param="jobs")
    return ids


def _facts(run: RunDir, kept: SeriesCache) -> JobFacts:
    """All from its run directory: Redis is not needed. Raises Damaged."""
    plan = None
    try:
        with suppress(NotFound):  # not checked yet, or refused before that
            plan = run.plan()
        return JobFacts.of(run.spec(), run.record(), plan, run.events(), kept.pace(run.metrics_file))
    except NewerFormat:
        raise
    except Damaged as error:
        raise Damaged(f"job {run.id} is damaged: {error}", hint=error.hint) from error
