"""Read by every Python that a test starts: what a user's machine does when it has nothing else to do is done at once.

Generation and exports take the time of the CPU that nobody else wants (SCHED_IDLE). Beside other tests that is none,
for minutes. Which policy a process has asked for is then its name (/proc/PID/comm).

Where LONGHAUL_TEST_SOON is set, whoever was killed is missed soon, too: with the periods of a user's machine a test
would wait most of a minute for that, with both CPUs idle.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def _named_by_it(pid: int, policy: int, param: os.sched_param) -> None:
    with open("/proc/self/comm", "w") as comm:
        comm.write(f"policy {policy}")


os.nice = lambda increment: 0
os.sched_setscheduler = _named_by_it

SOON: dict[str, dict[str, float]] = {
    "jobs.redis.store": {"LEASE_MS": 10_000},
    "worker.supervise": {"RENEW_S": 1.0},
    "worker.reconcile": {"EVERY_S": 3.0, "STANDBY_S": 1.0},
    "worker.runs_lock": {"UNKNOWN_S": 6.0},
    "jobs.redis.requests": {"HELD_S": 6.0},
    "worker.requests": {"HEARTBEAT_S": 1.0},
}
"""Constants of modules, and what they are instead. Who lives still says so many times before it is missed."""


class _Soon:
    """Finds those modules, before all other finders."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name not in SOON:
            return None
        spec: Any = PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def run_and_replace(module: Any) -> None:
            run(module)
            assert SOON[name].keys() <= vars(module).keys(), f"{name} has other constants now"
            vars(module).update(SOON[name])

        spec.loader.exec_module = run_and_replace
        found: ModuleSpec = spec
        return found


if "LONGHAUL_TEST_SOON" in os.environ:
    sys.meta_path.insert(0, _Soon)
