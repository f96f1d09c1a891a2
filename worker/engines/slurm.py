"""Slurm: a task is a batch job on one node, which sees the box's disks at the same paths."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from jobs.disk.files import regular
from worker.engines.engine import (
    EngineRefused,
    EngineTask,
    EngineUnavailable,
    NoProgram,
    SharedStorage,
    Storage,
    TaskState,
    TaskStatus,
    ask,
    run,
)
from worker.engines.settings import EngineSettings

_S = TaskStatus
STATES: Mapping[str, TaskStatus] = {
    # Base states, as `man squeue` lists them under JOB STATE CODES.
    "PENDING": _S.QUEUED, "RUNNING": _S.RUNNING, "SUSPENDED": _S.QUEUED, "COMPLETED": _S.ENDED,
    "CANCELLED": _S.PREEMPTED, "FAILED": _S.FAILED, "TIMEOUT": _S.PREEMPTED, "NODE_FAIL": _S.PREEMPTED,
    "PREEMPTED": _S.PREEMPTED,
    "BOOT_FAIL": _S.PREEMPTED, "DEADLINE": _S.PREEMPTED, "OUT_OF_MEMORY": _S.OUT_OF_MEMORY,
    # Flags, shown in place of the base state. A job that was put back into the queue would be the same task again: it
    # is ended, and the next attempt is another one.
    "COMPLETING": _S.RUNNING, "CONFIGURING": _S.QUEUED, "POWER_UP_NODE": _S.QUEUED, "RESIZING": _S.RUNNING,
    "STAGE_OUT": _S.RUNNING, "SIGNALING": _S.RUNNING, "UPDATE_DB": _S.RUNNING, "STOPPED": _S.QUEUED,
    "EXPEDITING": _S.QUEUED, "RESV_DEL_HOLD": _S.QUEUED, "REQUEUED": _S.PREEMPTED, "REQUEUE_FED": _S.PREEMPTED,
    "REQUEUE_HOLD": _S.PREEMPTED, "SPECIAL_EXIT": _S.PREEMPTED, "REVOKED": _S.PREEMPTED, "LAUNCH_FAILED": _S.PREEMPTED,
    "RECONFIG_FAIL": _S.PREEMPTED,
}  # fmt: skip
"""What Slurm calls them. Of one that is not here it is not known whether it is an end."""
LINES = 40
LONGEST_OUTPUT = 65_536
"""Bytes of the script's output that are read."""
OWN_OPTIONS = frozenset({
    "account", "array", "chdir", "clusters", "cpus-per-task", "error", "export", "export-file", "gid", "gpus",
    "gpus-per-node", "gpus-per-task", "help", "hold", "job-name", "mem", "no-requeue", "nodes", "ntasks", "open-mode",
    "output", "parsable", "partition", "qos", "requeue", "signal", "test-only", "time", "uid", "usage", "version",
    "wait", "wrap",
})  # fmt: skip
"""Options that Longhaul sets, and those with which a task would not be one job with one id that trains one attempt."""


class SlurmSettings(EngineSettings):
    """`kind = "slurm"`: `sbatch`, `squeue`, `sacct` and `scancel` are programs of this machine."""

    kind: Literal["slurm"]
    partition: str | None = None
    """`--partition`."""
    account: str | None = None
    """`--account`."""
    qos: str | None = None
    """`--qos`."""
    time: str | None = None
    """`--time`, the longest that an attempt may take, such as `12:00:00`. The next one resumes from the checkpoint."""
    notice_s: Annotated[int, Field(ge=10, le=3600)] = 120
    """Seconds before that time in which an attempt saves its checkpoint."""
    cpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """`--cpus-per-task`."""
    memory: str | None = None
    """`--mem`, memory of the host, such as `64G`."""
    sbatch: tuple[str, ...] = ()
    """Further options of sbatch, each with its dashes, such as `--constraint=a100`."""

    @field_validator("sbatch")
    @classmethod
    def _options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not re.fullmatch(r"--[a-z-]+(=[!-~]+)?", option):
                raise ValueError(f"{option!r} is no option of sbatch; write it with its dashes, as `--constraint=a100`")
            # sbatch takes the beginning of a name for the name, too.
            name = option.removeprefix("--").partition("=")[0]
            if any(own.startswith(name) for own in OWN_OPTIONS):
                raise ValueError(f"{option} cannot be set: Longhaul sets it, or it does not fit a task of Longhaul's")
        return options

    @field_validator("partition", "account", "qos", "time", "memory")
    @classmethod
    def _one_word(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[!-~]+", value):
            raise ValueError(f"{value!r} is not one word")
        return value

    @model_validator(mode="after")
    def _notice_is_within_time(self) -> SlurmSettings:
        if self.time is not None and (seconds := _seconds(self.time)) is not None and seconds <= self.notice_s:
            raise ValueError(
                f"time: {self.time} is not longer than notice_s ({self.notice_s}), so that no attempt could train; "
                "give it time to load the model and to train, too"
            )
        return self

    @property
    def host_memory_bytes(self) -> int | None:
        """What `memory` says, where host_memory_gib says nothing."""
        found = re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", self.memory or "", re.IGNORECASE)
        if self.host_memory_gib is not None or found is None:
            return super().host_memory_bytes
        unit: int = 1024 ** {"K": 1, "M": 2, "": 2, "G": 3, "T": 4}[found[2].upper()]
        return int(found[1]) * unit

    def connect(self) -> Slurm:
        """Its programs."""
        return Slurm(self)


class Slurm:
    """The engine, by its programs."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._outputs: dict[str, Path] = {}
        self.storage: Storage = SharedStorage()

    def render(self, task: EngineTask) -> str:
        """The script for sbatch."""
        given = self._settings
        options = {
            "--job-name": task.name,
            "--output": str(_output(task)).replace("%", "%%"),
            "--open-mode": "append",
            "--chdir": str(task.directory),
            "--export": "NONE",
            "--nodes": "1",
            "--ntasks": "1",
            "--signal": f"B:TERM@{given.notice_s}",
            "--partition": given.partition,
            "--account": given.account,
            "--qos": given.qos,
            "--time": given.time,
            "--cpus-per-task": given.cpus,
            "--mem": given.memory,
            "--gpus-per-node": task.gpus or None,
        }
        lines = [f"{name}={_word(str(value))}" for name, value in options.items() if value is not None]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(task.environment.items())]
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {line}" for line in [*lines, "--no-requeue", *given.sbatch]),
                "unset SLURM_EXPORT_ENV",  # of --export=NONE: where the command is srun, its program needs what follows
                *exports,
                # In place of the shell, so that the signal of the line above reaches it.
                f"exec {shlex.join(task.command)}",
                "",
            ]
        )

    def submit(self, task: EngineTask) -> str:
        """Its id at Slurm."""
        said = run(["sbatch", "--parsable"], self.render(task))
        number = said.strip().split(";")[0]  # ID, or ID;CLUSTER
        if not number.isdecimal():
            raise EngineUnavailable(f"sbatch said {said.strip()[:100]!r}, which is no id of a job")
        self._outputs[number] = _output(task)
        return number

    def find(self, name: str) -> str | None:
        """By name, of those that have not ended."""
        found = ask(["squeue", "--noheader", "--me", f"--name={name}", "--format=%i"]).split()
        return found[0] if found else None

    def state(self, task: str) -> TaskState:
        """From the queue; of what has left it from the accounting, where there is one: it is over in any case."""
        try:
            said = run(["squeue", "--noheader", "--states=all", f"--jobs={task}", "--format=%T|%r"])
        except EngineRefused as error:
            if "Invalid job id" not in str(error):
                raise EngineUnavailable(str(error)) from None
            said = ""
        if said.strip():
            state, _, reason = said.strip().split("\n")[0].partition("|")
            if state not in STATES:
                raise EngineUnavailable(f"squeue says {state[:40]!r}, a state that is not known here")
            return TaskState(STATES[state], state + ("" if reason in ("", "None") else f" ({reason})"))
        try:
            rows = run(
                ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={task}", "--format=State,ExitCode"]
            )
        except NoProgram:
            return TaskState(_S.GONE, "not in the queue any more, and there is no sacct here")
        except EngineRefused as error:
            if "accounting storage is disabled" in str(error):
                return TaskState(_S.GONE, "not in the queue any more, and Slurm keeps no accounts here")
            raise EngineUnavailable(str(error)) from None
        if not rows.strip():
            return TaskState(_S.GONE, "Slurm does not know it any more")
        state, _, code = rows.strip().split("\n")[-1].partition("|")
        state = (state.split() or [""])[0]  # CANCELLED by 1000
        if (status := STATES.get(state)) is None or not status.over:  # accounts that Slurm has never closed
            return TaskState(_S.GONE, f"not in the queue any more, though sacct says {state[:40]!r}")
        return TaskState(status, f"{state} (exit code {code})")

    def logs(self, task: str) -> str:
        """What the script itself has said; the trainer writes to trainer.log."""
        if (file := self._outputs.get(task)) is None:
            return ""
        try:
            with open(file, "rb", opener=_no_link) as output:
                output.seek(max(0, output.seek(0, os.SEEK_END) - LONGEST_OUTPUT))
                return "".join(output.read().decode(errors="replace").splitlines(keepends=True)[-LINES:])
        except OSError:
            return ""

    def cancel(self, task: str) -> None:
        """End it."""
        try:
            run(["scancel", task])
        except EngineRefused as error:
            if "Invalid job id" not in str(error) and "already completing" not in str(error):
                raise EngineUnavailable(str(error)) from None


def _output(task: EngineTask) -> Path:
    return task.run / "attempts" / f"{task.attempt}.slurm.log"


def _no_link(path: str, flags: int) -> int:
    """An `opener`: whoever writes to the run directory on the node chooses no other file of this machine."""
    return regular(path, flags | os.O_NOFOLLOW)


def _seconds(time: str) -> int | None:
    """Of a time limit as `man sbatch` has it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. None: none of these."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        return None
    days, *parts = found.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:  # minutes first
        given = [0, *given]
    hours, minutes, seconds = [*given, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _word(value: str) -> str:
    """As sbatch reads options: quoted where a blank or a quote is in it."""
    return (
        value if re.fullmatch(r"[\w%+,./:@=-]+", value) else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    )
