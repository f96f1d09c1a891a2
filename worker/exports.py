"""Exports and uploads to the hub, which somebody asked for: each in a process of its own, at the lowest priority."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Sequence

from jobs.attempt import Finished, Heartbeat
from jobs.disk.rundir import RunDir, list_runs
from jobs.errors import NotFound
from jobs.export import EXPORTS, ExportFormat, ExportRequest, PushRequest
from jobs.process.logs import last_error
from jobs.reasons import Reason
from jobs.redis.requests import Request
from worker.requests import AnswerWriter, RequestFailed
from worker.settings import WorkerSettings
from worker.trainer import here
from worker.warm import ASKED_WITHIN_S, Process

LOOK_S = 0.5
SWEEP_S = 60.0


class ProcessHandler:
    """`RequestHandler` that has `python -m worker.training` do it, and tells how far that is."""

    kind: str

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings

    def command(self, request: Request, run: RunDir) -> tuple[str, Sequence[str]]:
        """The name of the file that the process speaks through, and its arguments."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Of its process: without secrets."""
        return dict(self._settings.trainer_environment)

    @property
    def warm(self) -> str | None:
        """Socket of the process that forks its process; None: it is started as any program."""
        return None

    def answer(self, request: Request, answer: AnswerWriter) -> None:
        """See `RequestHandler`. Raises NotFound, RequestFailed."""
        run = RunDir(self._settings.runs / request.job)
        if not run.exists():
            raise NotFound(f"there is no job {request.job}")
        name, arguments = self.command(request, run)
        said, log = run.attempt_file(name), run.attempt_file(name).with_suffix(".log")
        said.unlink(missing_ok=True)
        with open(log, "wb") as output:
            process = here(self.environment(), self.warm, within_s=ASKED_WITHIN_S)(arguments, output.fileno())
        try:
            self._follow(process, run, name, answer)
        finally:
            if process.poll() is None:
                process.kill()
            code = process.wait()
            self.tidy(run)
        self._refuse_deleted(run)
        end = _newest(run, name)
        if isinstance(end, Finished) and end.reason is Reason.DONE:
            answer.add("done", {})
        elif isinstance(end, Finished) and end.error is not None:
            raise RequestFailed(end.error.message, code=end.error.code, hint=end.error.hint)
        elif process.cause is not None:
            raise RequestFailed(
                f"the process that forked this {self.kind} has ended, and the {self.kind} with it",
                code="crash",
                hint="ask again: another one is started",
            )
        else:
            why = last_error(log.read_text(errors="replace")[-4096:])
            raise RequestFailed(
                f"the process of this {self.kind} ended with {code}" + (f": {why[:300]}" if why else ""),
                code="crash",
                hint=f"its log is {log} on the server",
            )

    def _follow(self, process: Process, run: RunDir, name: str, answer: AnswerWriter) -> None:
        """Until it ends. Raises NotFound once the job is deleted, and what `AnswerWriter.hold` and `.add` do."""
        told: Heartbeat | None = None
        while True:
            try:
                process.wait(LOOK_S)
                return
            except subprocess.TimeoutExpired:
                answer.hold()
            self._refuse_deleted(run)
            beat = _newest(run, name)
            if isinstance(beat, Heartbeat) and (told is None or beat.phase != told.phase):
                answer.add("progress", {"phase": beat.phase, "at": time.time()})
                told = beat

    def _refuse_deleted(self, run: RunDir) -> None:
        if not run.exists():
            raise NotFound(f"job {run.id} was deleted, and its {self.kind} is given up")

    def tidy(self, run: RunDir) -> None:
        """After its process has ended, also where it was killed: nothing."""

    def idle(self) -> None:
        """See `RequestHandler`: nothing."""

    def close(self) -> None:
        """See `RequestHandler`: nothing."""


class ExportHandler(ProcessHandler):
    """A finished model in another format."""

    kind = "export"
    _swept = -SWEEP_S

    def environment(self) -> dict[str, str]:
        """It asks no hub."""
        return {**super().environment(), "HF_HUB_OFFLINE": "1"}

    @property
    def warm(self) -> str | None:
        """See `ProcessHandler`."""
        return self._settings.warm

    def command(self, request: Request, run: RunDir) -> tuple[str, Sequence[str]]:
        """See `ProcessHandler`."""
        asked = ExportRequest.model_validate(request.payload)
        of_dtype = [] if asked.dtype is None else ["--dtype", asked.dtype]
        return f"export-{asked.format}", ["export", os.fspath(run.path), asked.format, *of_dtype]

    def tidy(self, run: RunDir) -> None:
        """Remove what a killed export has left."""
        remove_unfinished(run)

    def idle(self) -> None:
        """Every minute, and first of all, the same in each run directory: a worker may have been killed, too."""
        if time.monotonic() - self._swept >= SWEEP_S and self._settings.runs.is_dir():
            for run in list_runs(self._settings.runs):
                remove_unfinished(run)
            self._swept = time.monotonic()


class PushHandler(ProcessHandler):
    """An upload to the hub. The token is in the environment of its process, and in nothing that is written or said."""

    kind = "push"

    def environment(self) -> dict[str, str]:
        """With the token."""
        return {**super().environment(), **self._settings.hub_tokens}

    def command(self, request: Request, run: RunDir) -> tuple[str, Sequence[str]]:
        """See `ProcessHandler`."""
        asked = PushRequest.model_validate(request.payload)
        more = ["--public"] * asked.public + ([] if asked.export is None else ["--export", asked.export])
        return "push", ["push", os.fspath(run.path), asked.repository, "--license", asked.license, *more]


def remove_unfinished(run: RunDir) -> None:
    """Remove `exports/tmp-FORMAT` of exports that were killed. One that is being made holds its lock."""
    folder = run.path / EXPORTS
    for format in ExportFormat:
        temporary = folder / f"tmp-{format}"
        if folder.is_symlink() or not temporary.is_dir():
            continue
        with open(folder / f".{format}.lock", "ab") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(temporary, ignore_errors=True)


def _newest(run: RunDir, name: str) -> object:
    lines = run.attempt_lines(name)
    return lines[-1] if lines else None
