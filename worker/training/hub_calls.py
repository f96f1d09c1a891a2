"""Calls of the hub's client: with a deadline, with progress, and with its errors in our words."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from jobs.errors import Rejected, StageError
from jobs.text.units import format_duration
from worker.training.journal import Journal

_POLL_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class HubRequest:
    """What the hub is asked for, for errors."""

    kind: str
    """`model` or `dataset`: as in the hub's addresses and in the codes of errors."""
    name: str
    param: str
    """Dotted key of the job."""
    instead: str
    """What else a user can write where there is no hub."""

    def unreachable(self, why: str) -> Rejected:
        """The error for a hub that cannot be asked."""
        return self.refused(
            "hub_unreachable",
            f"{self.name} is not stored here, and the hub cannot be asked for it: {why}",
            f"check the network, or use {self.instead}",
        )

    def refused(self, code: str, what: str, hint: str) -> Rejected:
        """An error about it."""
        return Rejected(f"{self.param}: {what}", code=code, param=self.param, hint=hint)


def call_with_timeout(seconds: float, call: Callable[[], T], wanted: HubRequest) -> T:
    """The call's result, or its error in our words; `hub_unreachable` if it takes longer."""
    done = _BackgroundCall(call)
    done.thread.join(seconds)
    if done.thread.is_alive():
        raise wanted.unreachable(f"no answer within {format_duration(seconds)}")
    return done.result(wanted)


def watch_download(call: Callable[[], Path], growing: Path, total: int, journal: Journal, wanted: HubRequest) -> Path:
    """A download's result. Progress is reported when bytes have come in, and only then."""
    done, before = _BackgroundCall(call), -1
    while done.thread.is_alive():
        done.thread.join(_POLL_S)
        now = sum(file.stat().st_size for file in growing.glob("*")) if growing.exists() else 0
        if now != before:
            journal.progress(min(1.0, now / total) if total else None)
            before = now
    return done.result(wanted)


class _BackgroundCall(Generic[T]):
    """Runs a call in a daemon thread: the hub's client has no deadline over all its retries."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._value: T | None = None
        self._error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except Exception as error:
            self._error = error

    def result(self, wanted: HubRequest) -> T:
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
        from huggingface_hub.errors import RevisionNotFoundError as NoRevision

        error = self._error
        if error is None:
            return cast(T, self._value)
        if isinstance(error, StageError) or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise error
        if isinstance(error, GatedRepoError):
            hint = "accept its terms on the hub and put a token with read access in HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            hint = (
                f"check the spelling (org/name); for a private {wanted.kind} put a token in HF_TOKEN; "
                f"without a hub, use {wanted.instead}"
            )
        elif isinstance(error, NoRevision | HFValidationError):
            hint = f"write org/name, or org/name@revision with a branch, tag or commit of that {wanted.kind}"
        else:
            # Whatever HTTP, TLS or name resolution may raise: the client's own library is not ours to import.
            raise wanted.unreachable(f"{type(error).__name__}: {error}") from error
        raise wanted.refused(
            f"{wanted.kind}_not_found", f"the hub has no {wanted.name} for us: {str(error).splitlines()[0]}", hint
        ) from error
