"""What kubectl says of a TrainJob and of its pods, as far as it matters here."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from jobs.frozen import Frozen
from worker.engines.engine import EngineUnavailable

Answer = TypeVar("Answer", bound=BaseModel)


class Said(Frozen, extra="ignore", populate_by_name=True):
    """A part of what kubectl says, as far as it matters here."""


class Condition(Said):
    type: str
    status: str
    reason: str = ""
    message: str = ""

    @property
    def text(self) -> str:
        """In the words of Kubernetes."""
        said = " ".join((self.message or self.reason).split())[:300]
        return f"{self.type} ({said})" if said else self.type


class ChildJobs(Said):
    ready: int = 0


class TrainJobStatus(Said):
    conditions: tuple[Condition, ...] = ()
    jobs: Annotated[tuple[ChildJobs, ...], Field(alias="jobsStatus")] = ()


class Metadata(Said):
    deleted_at: Annotated[str | None, Field(alias="deletionTimestamp")] = None


class TrainJob(Said):
    metadata: Metadata
    status: TrainJobStatus = TrainJobStatus()


class End(Said):
    reason: str = ""
    code: Annotated[int, Field(alias="exitCode")] = 0


class ContainerState(Said):
    end: Annotated[End | None, Field(alias="terminated")] = None


class Container(Said):
    state: ContainerState = ContainerState()


class PodStatus(Said):
    reason: str = ""
    conditions: tuple[Condition, ...] = ()
    containers: Annotated[tuple[Container, ...], Field(alias="containerStatuses")] = ()

    @property
    def taken_away(self) -> bool:
        """Evicted, preempted, or lost with its machine."""
        return bool(self.reason) or any(
            each.type == "DisruptionTarget" and each.status == "True" for each in self.conditions
        )


class Pod(Said):
    status: PodStatus = PodStatus()


class Pods(Said):
    items: tuple[Pod, ...] = ()


def parsed(kind: type[Answer], said: str) -> Answer:
    """Raises EngineUnavailable where it is something else."""
    try:
        return kind.model_validate_json(said)
    except ValidationError as error:
        raise EngineUnavailable(f"what kubectl says is not understood: {error.errors()[0]['msg']}") from None
