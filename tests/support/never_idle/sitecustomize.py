"""Read by every Python that a test starts: what a user's machine does when it has nothing else to do is done at once.

Generation and exports take the time of the CPU that nobody else wants (SCHED_IDLE). Beside other tests that is none,
for minutes. Which policy a process has asked for is then its name (/proc/PID/comm).

Where LONGHAUL_TEST_SOON is set, whoever was killed is missed soon, too: with the periods of a user's machine a test
would wait most of a minute for that, with both CPUs idle.
"""

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


def _named_by_it(pid: int, policy: int, param: os.sched_param) -> None:
    with open("/proc/self/comm", "w") as comm:
        comm.write(f"policy {policy}")


os.nice = lambda increment: 0
os.sched_setscheduler = _named_by_it

SOON: dict[str, dict[str, object]] = {
    "jobs.redis.store": {"LEASE_MS": 10_000},
    "worker.supervise": {"RENEW_S": 1.0},
    "worker.reconcile": {"EVERY_S": 3.0, "STANDBY_S": 1.0},
    "worker.runs_lock": {"UNKNOWN_S": 6.0},
    "jobs.redis.requests": {"HELD_S": 6.0},
    "worker.requests": {"HEARTBEAT_S": 1.0},
}
"""Constants of modules, and what they are instead. Who lives still says so many times before it is missed."""


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        soon = SOON[module.__name__]
        assert soon.keys() <= vars(module).keys(), f"{module.__name__} has other constants now"
        vars(module).update(soon)


class _Finder:
    """Finds those modules, before all other finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in SOON else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


if "LONGHAUL_TEST_SOON" in os.environ:
    sys.meta_path.insert(0, _Finder())
