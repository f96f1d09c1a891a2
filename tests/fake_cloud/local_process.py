"""A task's program by the local process backend of Kubeflow's SDK, which makes a virtual environment with torch, and
starts a function in it with torchrun. Needs the SDK (`make engines`).
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient

METADATA = "torch-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 0\n"
WHEEL = "torch-0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
RECORD = "torch-0.dist-info/RECORD", ""


def train(command):  # type: ignore[no-untyped-def]  # its source is copied into a file of its own
    """What torchrun starts becomes the program."""
    import os

    os.execv(command[0], command)


class LocalProcess:
    """`machine.Running` by `TrainerClient`."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._command = command
        self.pid = os.getpid()
        self._client = TrainerClient(LocalProcessBackendConfig())
        trainer = CustomTrainer(
            func=train,
            func_args=command,
            packages_to_install=[torch_of(environment["KUBEFLOW_LOCAL_PROCESS"])],
            env=environment,
        )
        self._job = self._client.train(runtime="torch-distributed", trainer=trainer)

    def poll(self) -> int | None:
        """0 or 1: the backend has no exit codes."""
        status = self._client.get_job(self._job).status
        if status in ("Complete", "Failed"):
            print("\n".join(self._client.get_job_logs(self._job)), flush=True)
        return {"Complete": 0, "Failed": 1}.get(status)

    def signal(self, number: int) -> None:
        """To the program itself, as Kubernetes does: the backend's `delete_job` ends the shell around it alone."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):
                    if (folder / "cmdline").read_bytes().split(b"\0")[:-1] == [
                        os.fsencode(each) for each in self._command
                    ]:
                        os.kill(int(folder.name), number)


def torch_of(environment: str) -> str:
    """A requirement for `torch` that installs a `torchrun` alone: that of the environment that trains."""
    wheel = Path(tempfile.mkdtemp()) / "torch-0-py3-none-any.whl"
    script = zipfile.ZipInfo("torch-0.data/scripts/torchrun")
    script.external_attr = 0o100755 << 16
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(script, f'#!/bin/sh\nexec {environment}/torchrun "$@"\n')
        for name, content in (METADATA, WHEEL, RECORD):
            file.writestr(name, content)
    return f"torch @ {wheel.as_uri()}"
