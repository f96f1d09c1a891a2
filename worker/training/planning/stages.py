"""The memory plan in the stages check and prepare: made, drawn, and not made twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from jobs.errors import DiskFull, DoesNotFit, Rejected
from jobs.gpus import GpuFacts
from jobs.memory_plan import PICTURE, DType, MemoryPlan, OptimizerName
from jobs.spec import MOST_GPUS, JobSpec
from jobs.text.units import format_bytes
from worker.training.journal import Journal
from worker.training.planning.budget import Budget, find_budget
from worker.training.planning.picture import draw
from worker.training.planning.room import plan_disk, plan_host
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
    group, asked = settings.group, spec.resources.gpus
    most = 1 if trial or group is None else min(group.count, spec.training.batch_size, MOST_GPUS)
    before = most if earlier is not None and earlier.gpus > 1 else 1
    gpus = before if asked == "auto" else asked
    budget = find_budget(spec.memory, settings.device, settings.on(gpus).gpu, spec.resources)
    if earlier is not None and earlier.dtype == dtype and is_current(earlier, longest, budget, gpus):
        assert earlier.host is not None and earlier.disk is not None, "a plan of this stage has both"
        kept, on_host = earlier.host.copy_bytes, earlier.host.optimizer_bytes
        disk = plan_disk(run.path, spec, kept, earlier.disk.model_bytes)
        plan = earlier.model_copy(
            update={"host": plan_host(kept, on_host, earlier.host.available_bytes if on_host else None), "disk": disk}
        )
        drawn = picture.exists()  # and nothing in it has changed
    else:
        # Imported here: torch takes seconds, and a wrong job is refused before that, at once.
        from worker.training.planning.memory_plan import plan_memory

        def planned(gpu: GpuFacts | None, gpus: int | None = None) -> MemoryPlan:
            return plan_memory(
                spec,
                task,
                config,
                longest,
                device=settings.device,
                budget=find_budget(spec.memory, settings.device, gpu, spec.resources),
                run=run.path,
                traces=settings.traces,
                optimizer=optimizer,
                dtype=dtype,
                gpus=gpus,
                offload=not trial,  # trials share a host, and nothing reserves its memory
                progress=journal.progress,
            )

        try:
            plan = planned(settings.gpu)
        except DoesNotFit as error:
            found, refused = on_several(error, spec, lambda: planned(group, most)) if most > 1 else (None, error)
            if found is None:
                write_atomically(picture, draw(refused.memory))
                raise refused from None
            plan = found
        drawn = False
    if trial:
        picture.unlink(missing_ok=True)  # of a check that was refused, and lost before it could say so
    elif not drawn:
        write_atomically(picture, draw(plan))
    return plan


def on_several(
    error: DoesNotFit, spec: JobSpec, planned: Callable[[], MemoryPlan]
) -> tuple[MemoryPlan | None, DoesNotFit]:
    """The plan on several GPUs for a job that does not fit one, if it may have them and fits; else None, and the error,
    which says what helps.
    """
    asked = spec.resources.gpus
    try:
        plan = planned()
    except DoesNotFit as also:
        return None, also if asked == "auto" else error
    except (Rejected, DiskFull):  # a budget, an optimizer, or a disk, that they cannot have
        return None, error
    if asked == "auto":
        return plan, error
    hint = f"with resources.gpus: {plan.gpus} it fits: {format_bytes(plan.peak_bytes)} of each GPU; or {error.hint}"
    return None, DoesNotFit(str(error), error.memory, param="resources.gpus", hint=hint)


def is_current(plan: MemoryPlan, longest: tuple[int, int], budget: Budget, gpus: int) -> bool:
    """Whether a plan made now would be the same. A host's free memory changes by itself: there, whether it fits."""
    same = (plan.input_tokens, plan.target_tokens, plan.budget_source, plan.gpu, plan.gpus) == (
        *longest, budget.source, budget.gpu_name, gpus,
    )  # fmt: skip
    if plan.host is not None and plan.host.optimizer_bytes:
        host = None if budget.gpu is None else budget.gpu.host_memory_bytes
        same = same and host in (None, plan.host.available_bytes)
    return same and (plan.peak_bytes <= budget.limit if budget.source == "host" else plan.budget_bytes == budget.bytes)
