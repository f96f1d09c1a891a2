"""A child process that is spoken to in JSON lines: one question at a time, one answer each, no waiting without end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO

from worker.warm import ASKED_WITHIN_S, ForkedProcess, OwnProcess, fork


class ChildGone(Exception):
    """The child has ended, or does not keep to the protocol."""


class JsonChild:
    """Spawned, since its parent has threads, or `forked` by the warm process. `command` or `environment` ties what is
    spawned to the calling thread (`jobs.process.lifeline`).
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        process = OwnProcess(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            process_group=0,
            bufsize=0,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._speak(process, process.stdin, process.stdout)

    @classmethod
    def forked(cls, warm: str, arguments: Sequence[str], environment: Mapping[str, str]) -> JsonChild | None:
        """`python -m worker.training ARGUMENTS`, forked by the process that listens at the socket `warm`. None: start
        it yourself.
        """
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        stdin, stdout = os.fdopen(ours_in, "wb", 0), os.fdopen(ours_out, "rb", 0)
        others = theirs_in, sys.stderr.fileno()
        process = fork(warm, arguments, environment, theirs_out, *others, within_s=ASKED_WITHIN_S)
        os.close(theirs_in)
        os.close(theirs_out)
        if process is None:
            stdin.close()
            stdout.close()
            return None
        child = cls.__new__(cls)
        child._speak(process, stdin, stdout)
        return child

    def _speak(self, process: OwnProcess | ForkedProcess, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout
        self._read, self._unsent = b"", b""
        os.set_blocking(self._stdin.fileno(), False)

    def ask(self, question: Mapping[str, object]) -> None:
        """Send one line: as much as the child takes now, the rest while its answer is waited for."""
        self._unsent += json.dumps(question, ensure_ascii=False).encode() + b"\n"
        self._send()

    def answer(self, timeout_s: float) -> dict[str, object] | None:
        """The answer; None if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            sending = [self._stdin] if self._unsent else []
            left_s = max(0.0, deadline - time.monotonic())
            readable, writable, _ = select.select([self._stdout], sending, [], left_s)
            if writable:
                self._send()
            elif not readable:
                return None
            if readable:
                more = os.read(self._stdout.fileno(), 65536)
                if not more:
                    raise ChildGone("has ended")
                self._read += more
        line, _, self._read = self._read.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ChildGone("sent something that is not an answer")
        return answer

    def _send(self) -> None:
        try:
            self._unsent = self._unsent[self._stdin.write(self._unsent) or 0 :]
        except OSError as error:
            raise ChildGone(f"cannot be written to: {error}") from error

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def kill(self) -> int:
        """SIGKILL; returns the exit code, which is that of an earlier end if there was one."""
        self._process.kill()
        code = self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return code

    def end(self, timeout_s: float) -> None:
        """Close stdin; kill the child if it does not exit."""
        self._stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
