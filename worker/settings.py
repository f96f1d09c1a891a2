"""Settings of every worker process. The environment is read once, in `worker.command_line`, and passed down."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs import integrations
from jobs.memory_plan import prepare_memory
from jobs.process.lifeline import WARM
from jobs.process.logs import log_format
from jobs.process.public_url import public_url
from jobs.process.secrets import HUB, minimal_environment
from worker.engines.registry import read_engines
from worker.engines.settings import EngineSettings


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to know; secrets are masked in `repr`."""

    redis_url: str = field(repr=False)
    runs: Path
    data: Path
    uploads: Path
    prepared: Path
    models: Path
    device: str
    box: str = field(default_factory=platform.node)
    """Name of this machine, for people, and for what concerns the GPUs of one machine alone."""
    gpus: str = "all"
    """Which GPUs train, each with a worker: `all`, `none` (engines alone train), or their indexes and UUIDs with commas
    between."""
    trials_at_once: int = 1
    """How many trials of sweeps may share a GPU, or the CPU."""
    integrations: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The variables of sinks (`jobs/integrations.py`) that are set."""
    public_url: str | None = None
    """Where people reach the service."""
    engines: Mapping[str, EngineSettings] = field(default_factory=dict)
    """Engines of others that train jobs, by name."""
    generate_idle_s: float = 600.0
    """Seconds without a request after which the worker `generate` gives its model up."""
    log: str = "text"
    """Form of the log: text or json."""
    trainer_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What processes of `worker.training` inherit: the environment without secrets."""
    warm: str | None = None
    """Socket of the process that forks trainers, where another process keeps it."""
    hub_tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What those that reach the hub are given beside it: check, prepare and push."""

    @property
    def masked_redis_url(self) -> str:
        """The Redis URL without its password, for messages."""
        return re.sub(r"//[^@/]*@", "//…@", self.redis_url)

    def writes(self, role: str) -> tuple[Path, ...]:
        """The folders that a worker of this role must be able to write."""
        return (
            (self.runs,)
            if role in ("train", "generate", "push", "publish")
            else (self.runs, self.prepared, self.models)
        )


def from_environment(environ: Mapping[str, str]) -> WorkerSettings:
    """Read and check the environment. ValueError names the variable."""
    device = environ.get("LONGHAUL_DEVICE", "cuda")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"LONGHAUL_DEVICE is {device!r}; it is cpu or cuda")
    gpus = (environ.get("LONGHAUL_GPUS") or "all").replace(" ", "")
    if not re.fullmatch(r"all|none|(\d+|(GPU|MIG)-[\w/-]+)([,+](\d+|(GPU|MIG)-[\w/-]+))*", gpus):
        raise ValueError(f"LONGHAUL_GPUS is {gpus!r}; it is all, none, or a list such as 0,1 or 0+1,2 or GPU-…,MIG-…")
    if gpus == "all":
        gpus = environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "") or "all"
    engines = read_engines(Path(file)) if (file := environ.get("LONGHAUL_ENGINES")) else {}
    if gpus == "none" and not engines:
        raise ValueError("LONGHAUL_GPUS is none, and LONGHAUL_ENGINES names no engine: nothing would train")
    box = environ.get("LONGHAUL_BOX") or platform.node()
    if not re.fullmatch(r"[\w.-]{1,64}", box, re.ASCII):
        raise ValueError(f"LONGHAUL_BOX is {box!r}; it is up to 64 letters, digits, dots, hyphens and underscores")
    redis_url = environ.get("LONGHAUL_REDIS_URL") or "redis://127.0.0.1:6379/0"
    if not redis_url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("LONGHAUL_REDIS_URL is no Redis URL; it looks like redis://127.0.0.1:6379/0")
    prepare_memory(environ.get("LONGHAUL_PREPARE_MEMORY_GB"))  # read by the stages, which are processes of their own
    places = {
        name: Path(environ.get(f"LONGHAUL_{name.upper()}") or name).resolve()
        for name in ("runs", "data", "uploads", "prepared", "models")
    }
    clean = minimal_environment(environ, ())
    clean |= {f"LONGHAUL_{name.upper()}": os.fspath(path) for name, path in places.items()}
    return WorkerSettings(
        redis_url=redis_url,
        device=device,
        box=box,
        gpus=gpus,
        trials_at_once=_trials_at_once(environ.get("LONGHAUL_TRIALS_AT_ONCE") or ("1" if device == "cpu" else "4")),
        engines=engines,
        integrations={each.name: given for each in integrations.variables() if (given := environ.get(each.name))},
        public_url=public_url(environ.get("LONGHAUL_PUBLIC_URL")),
        generate_idle_s=_seconds(environ.get("LONGHAUL_GENERATE_IDLE_S") or "600"),
        log=log_format(environ.get("LONGHAUL_LOG") or "text"),
        trainer_environment=clean | {"LONGHAUL_DEVICE": device, "PYTHONUNBUFFERED": "1"},
        warm=environ.get(WARM),
        hub_tokens={name: environ[name] for name in HUB if name in environ},
        **places,
    )


def _trials_at_once(given: str) -> int:
    """LONGHAUL_TRIALS_AT_ONCE."""
    if not re.fullmatch(r"[1-9]\d?", given, re.ASCII):
        raise ValueError(f"LONGHAUL_TRIALS_AT_ONCE={given!r} is no number of trials: give 1 to 99")
    return int(given)


def _seconds(given: str) -> float:
    """LONGHAUL_GENERATE_IDLE_S."""
    if not re.fullmatch(r"\d{1,6}", given, re.ASCII):
        raise ValueError(f"LONGHAUL_GENERATE_IDLE_S={given!r} is no time: give seconds, such as 600")
    return float(given)
