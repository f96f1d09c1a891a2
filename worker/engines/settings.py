"""What the sections of LONGHAUL_ENGINES, whatever their kind, say of an engine."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from jobs.disk.rundir import RunDir
from jobs.frozen import Frozen
from jobs.heartbeat import Gpu
from jobs.process.secrets import VARIABLES, where_secret
from worker.engines.engine import Engine, EngineTask

GIB = 2**30


class EngineSettings(Frozen, strict=True):
    """An engine that trains jobs: what a task of it gets, and how it starts. A kind adds its own keys."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
    """By which jobs name it (`resources.engine`): the name of its section."""
    kind: str
    """Which engine it is."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What its tasks train on."""
    gpu_name: str | None = None
    """The GPU of a task, as its driver names it, such as `NVIDIA H100 80GB HBM3`."""
    gpu_memory_gib: Annotated[float, Field(gt=1.0, le=1024.0)] | None = None
    """Its memory in all, as nvidia-smi reports it, in GiB: 79.6 for an H100 of 80 GB."""
    host_memory_gib: Annotated[float, Field(gt=0.0, le=65_536.0)] | None = None
    """Memory of the host that a task may have, in GiB. Jobs with optimizer states there are planned for it; null: it is
    not known, and such jobs are taken."""
    native_bf16: bool = True
    """Whether it multiplies bf16 itself: from compute capability 8.0 on."""
    gpus: Annotated[int, Field(ge=1, le=16)] = 1
    """GPUs that a task may have at most, all on one node."""
    at_once: Annotated[int, Field(ge=1, le=64)] = 1
    """Tasks that the engine may have at the same time, waiting ones included."""
    directory: Path
    """A clone of Longhaul on the node, of the same version as the one here."""
    python: Annotated[tuple[str, ...], Field(min_length=1)]
    """The words that start Python on the node, such as `[".venv/bin/python"]`. Longhaul's requirements are in it."""
    environment: dict[str, str] = {}  # noqa: RUF012 - pydantic copies it
    """Further variables of the program."""
    look_every_s: Annotated[float, Field(ge=0.1, le=600.0)] = 10.0
    """Seconds between two questions to the engine how a task is."""
    alone_s: Annotated[float, Field(ge=5.0, le=86_400.0)] = 300.0
    """Seconds without a sign of life from here after which a task stops by itself, with a checkpoint."""

    @field_validator("directory")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        if not path.is_absolute():
            raise ValueError("it must be an absolute path")
        return path

    @model_validator(mode="after")
    def _gpu_is_known(self) -> EngineSettings:
        if self.device == "cuda" and (self.gpu_name is None or self.gpu_memory_gib is None):
            raise ValueError('gpu_name and gpu_memory_gib are missing; of an engine without GPUs set device = "cpu"')
        return self

    @field_validator("environment")
    @classmethod
    def _no_secret(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is None:
                raise ValueError(f"{name!r} is no name of a variable")
            if name in VARIABLES or where_secret({name: value}) is not None:
                raise ValueError(f"{name} looks like a secret, and a trainer needs none")
        return environment

    @property
    def host_memory_bytes(self) -> int | None:
        """None: not known."""
        return None if self.host_memory_gib is None else int(self.host_memory_gib * GIB)

    def gpu(self, place: int) -> Gpu | None:
        """The GPUs of one of its places; None: it trains on CPUs."""
        if self.gpu_name is None or self.gpu_memory_gib is None or self.device == "cpu":
            return None
        return Gpu(
            uuid=f"{self.name}/{place}",
            name=self.gpu_name,
            memory_bytes=int(self.gpu_memory_gib * GIB),
            native_bf16=self.native_bf16,
            host_memory_bytes=self.host_memory_bytes,
            count=self.gpus,
            driver="",
        )

    def task(self, run: RunDir, attempt: int, token: str, environment: Mapping[str, str], gpus: int) -> EngineTask:
        """What trains this attempt on a node. `environment`: of every trainer; `gpus`: that the job asks for."""
        plan = run.plan()
        node = ("-m", "worker.engines.node", str(run.path), "--attempt", str(attempt), "--token", token)
        return EngineTask(
            job=run.id,
            attempt=attempt,
            name=f"longhaul-{run.id.removeprefix('job-')}-{attempt}-{token[:8]}".lower()[:63],
            command=(*self.python, *node, "--alone-s", f"{self.alone_s:g}"),
            environment={**environment, **self.environment, "LONGHAUL_DEVICE": self.device},
            gpus=0 if self.device == "cpu" else gpus,
            run=run.path,
            directory=self.directory,
            stores=tuple(Path(each) for each in (plan.model.folder, plan.data.prepared) if each is not None),
        )

    @abstractmethod
    def connect(self) -> Engine:
        """The engine itself. Nothing is asked of it yet."""
