"""Two boxes: this one, and a network namespace with a train worker in it, which reaches Redis here over TLS.

Both see the same folders, as over NFS. What NFS does besides, that a server forgets the locks of a box that it has not
heard of, is done by `forget_locks`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from jobs.disk.files import write_atomically
from jobs.disk.rundir import RunDir
from tests.support.processes import descendants, thaw
from tests.support.redis_server import compose_box_rules, compose_rules, free_port
from tests.support.stack import ROOT, Stack
from tests.support.tls_proxy import TlsProxy

OTHER = "train-gpu2"
"""The role of the other box."""
NAMES = ("gpu2", "main")


def why_no_namespace() -> str | None:
    """Why no second box can be made here; None: one can."""
    if shutil.which("ip") is None:
        return "there is no `ip` here (Debian: iproute2)"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"longhaul-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return None if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


def make_box(folder: Path, host: str, name: str = NAMES[0]) -> Path:
    """`make box` in a folder that is like a clone's. Returns the folder `boxes` there."""
    folder.mkdir(exist_ok=True)
    for file in ("Makefile", ".env.example", "pyproject.toml"):
        shutil.copy(ROOT / file, folder)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LONGHAUL_", "MAKE", "SUDO_"))}
    if not (folder / ".env").exists():
        subprocess.run(["make", "env"], cwd=folder, env=clean, check=True, capture_output=True)
    command = ["make", "box", f"NAME={name}", f"HOST={host}"]
    subprocess.run(command, cwd=folder, env=clean, check=True, capture_output=True)
    return folder / "boxes"


def forget_locks(run: RunDir) -> None:
    """What an NFS server does with the locks of a client that it has not heard of for 90 s: the holder is not told, and
    what it had still to write to a locked file is refused. Here it goes to a file that has no name any more."""
    for file in (run.lock_file, run.events_file.with_name("events.lock"), run.events_file):
        content = file.read_bytes() if file.exists() else b""
        write_atomically(file, content)


class TwoBoxes(Stack):
    """`with TwoBoxes(folder, data=data) as boxes:`, then `boxes.start("service", …, OTHER)`, `cut()`, `join()`.

    Everything but `OTHER` is on this box.
    """

    def __init__(self, home: Path, *, data: Path) -> None:
        super().__init__(
            home,
            data=data,
            rules=compose_rules(),
            box_rules=compose_box_rules(),
            environment={"LONGHAUL_BOX": NAMES[1]},
            own_warm=True,  # what is frozen or killed on a box is what its worker has started
        )
        number = os.getpid() % 64000
        self.namespace, self._ends = f"longhaul-{number}", (f"lh{number}a", f"lh{number}b")
        self.address = f"10.{213 + number // 16384}.{number // 64 % 256}.{number % 64 * 4 + 1}"
        self.other_address = self.address.rpartition(".")[0] + f".{int(self.address.rpartition('.')[2]) + 1}"
        self.tls_port = free_port()
        self._open = ExitStack()
        self._certificates = home / "clone"

    def command(self, role: str, *words: str) -> list[str]:
        """See `Stack`."""
        command = super().command(role, *words)
        return ["ip", "netns", "exec", self.namespace, *command] if role == OTHER else command

    def environment_of(self, role: str) -> Mapping[str, str]:
        """See `Stack`."""
        if role != OTHER:
            return self.environment
        url = self.redis.box_url.replace("redis://", "rediss://").replace("127.0.0.1", self.address)
        url = url.replace(f":{self.redis.port}/", f":{self.tls_port}/")
        ca = self._certificates / "boxes" / NAMES[0] / "ca.crt"
        return {**self.environment, "LONGHAUL_REDIS_URL": f"{url}?ssl_ca_certs={ca}", "LONGHAUL_BOX": NAMES[0]}

    def cut(self) -> None:
        """No packet goes from one box to the other any more, and nobody is told."""
        self._ip("link", "set", self._ends[0], "down")

    def join(self) -> None:
        """They do again."""
        self._ip("link", "set", self._ends[0], "up")

    def processes_of_other(self) -> list[int]:
        """The worker of the other box, and all that it has started."""
        worker = self.processes[OTHER].pid
        return [worker, *descendants(worker)]

    def freeze_other(self) -> list[int]:
        """SIGSTOP all of it, parents first. Returns the pids."""
        frozen: list[int] = []
        while new := [pid for pid in self.processes_of_other() if pid not in frozen]:
            for pid in new:
                os.kill(pid, signal.SIGSTOP)
            frozen += new
        return frozen

    def thaw_other(self) -> None:
        """SIGCONT all of it."""
        for pid in self.processes_of_other():
            thaw(pid)

    def kill_other(self) -> None:
        """SIGKILL all of it, as when its power fails."""
        for pid in self.freeze_other():
            os.kill(pid, signal.SIGKILL)
        self.processes.pop(OTHER).wait()

    def __enter__(self) -> TwoBoxes:
        ours, theirs = self._ends
        self.home.mkdir(parents=True, exist_ok=True)
        self._ip("netns", "add", self.namespace)
        self._open.callback(self._ip, "netns", "del", self.namespace)
        self._ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", self.namespace)
        self._ip("address", "add", f"{self.address}/30", "dev", ours)
        self._ip("link", "set", ours, "up")
        self._ip("-n", self.namespace, "address", "add", f"{self.other_address}/30", "dev", theirs)
        for each in (theirs, "lo"):
            self._ip("-n", self.namespace, "link", "set", each, "up")
        made = make_box(self._certificates, self.address)
        self._open.enter_context(
            TlsProxy((self.address, self.tls_port), self.redis.port, made / "server.crt", made / "server.key")
        )
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._open.close()

    def _ip(self, *words: str) -> None:
        subprocess.run(["ip", *words], check=True)
