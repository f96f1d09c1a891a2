"""The memory plan in the stages check and prepare: made, drawn, and not made twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import DoesNotFit
from jobs.memory_plan import PICTURE, DType, MemoryPlan, OptimizerName
from jobs.spec import JobSpec
from worker.training.journal import Journal
from worker.training.planning.budget import Budget, find_budget, plan_disk, plan_host
from worker.training.planning.memory_plan import plan_memory
from worker.training.planning.picture import draw
from worker.training.settings import TrainerSettings
from worker.training.tasks.task import Task


def plan_stage(
    run: RunDir,
    spec: JobSpec,
    task: Task,
    config: Mapping[str, Any],
    longest: tuple[int, int],
    settings: TrainerSettings,
    journal: Journal,
    earlier: MemoryPlan | None = None,
    *,
    optimizer: OptimizerName | None = None,
    dtype: DType = "bfloat16",
) -> MemoryPlan:
    """The plan for rows of these lengths, with `memory.png` of it in the run directory, unless it is a trial's.

    `earlier`: that of check, which is as good for the same lengths and budget. `optimizer`: the one that a run began
    with; None: there is no run yet. `dtype`: of the model. Raises DoesNotFit, with the picture drawn, Rejected,
    DiskFull.
    """
    picture, trial = run.path / PICTURE, run.record().sweep is not None
    budget = find_budget(spec.memory, settings.device, settings.gpu, spec.resources)
    if earlier is not None and earlier.dtype == dtype and is_current(earlier, longest, budget, spec.resources.gpus):
        assert earlier.host is not None and earlier.disk is not None, "a plan of this stage has both"
        kept, on_host = earlier.host.copy_bytes, earlier.host.optimizer_bytes
        disk = plan_disk(run.path, spec, kept, earlier.disk.model_bytes)
        plan = earlier.model_copy(
            update={"host": plan_host(kept, on_host, earlier.host.available_bytes if on_host else None), "disk": disk}
        )
        drawn = picture.exists()  # and nothing in it has changed
    else:
        try:
            plan = plan_memory(
                spec,
                task,
                config,
                longest,
                device=settings.device,
                budget=budget,
                run=run.path,
                traces=settings.traces,
                optimizer=optimizer,
                dtype=dtype,
                offload=not trial,  # trials share a host, and nothing reserves its memory
                progress=journal.progress,
            )
        except DoesNotFit as refused:
            write_atomically(picture, draw(refused.memory))
            raise
        drawn = False
    if trial:
        picture.unlink(missing_ok=True)  # of a check that was refused, and lost before it could say so
    elif not drawn:
        write_atomically(picture, draw(plan))
    return plan


def is_current(plan: MemoryPlan, longest: tuple[int, int], budget: Budget, gpus: int) -> bool:
    """Whether a plan made now would be the same. A host's free memory changes by itself: there, whether it fits."""
    same = (plan.input_tokens, plan.target_tokens, plan.budget_source, plan.gpu, plan.gpus) == (
        *longest, budget.source, budget.gpu_name, gpus,
    )  # fmt: skip
    if plan.host is not None and plan.host.optimizer_bytes:
        host = None if budget.gpu is None else budget.gpu.host_memory_bytes
        same = same and host in (None, plan.host.available_bytes)
    return same and (plan.peak_bytes <= budget.limit if budget.source == "host" else plan.budget_bytes == budget.bytes)
