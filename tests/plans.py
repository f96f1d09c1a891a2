"""A plan.json as an attempt finds it, for tests in which no stage has run."""

from __future__ import annotations

from jobs.disk.rundir import RunDir
from jobs.plan import DataPlan, ModelPlan, make_plan


def write_plan(run: RunDir, prepared: str | None = None) -> None:
    """The plan of a job with 8 rows, which are in the folder `prepared`."""
    data = DataPlan(train="x", input="x", target="x", rows=8, prepared=prepared)
    run.write_plan(make_plan(run.spec(), ModelPlan(source="x", parameters=1), data))
