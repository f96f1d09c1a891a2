"""`python -m worker check|prepare|train|generate|push|publish`: one worker process; of several roles each gets a child.

`--healthy` asks instead whether workers of these roles on this machine report themselves healthy (container checks).
`python -m worker doctor` examines the machine and its GPU, and ends (`doctor --help` has its options).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from jobs.disk.files import unwritable
from jobs.heartbeat import Worker
from jobs.process import logs, secrets
from jobs.process.lifeline import PARENT_PID, WARM, tie_to_parent, tied_to_parent
from worker.settings import WorkerSettings, from_environment
from worker.warm import WarmProcess

log = logging.getLogger("longhaul.worker")
ROLES = ("check", "prepare", "train", "generate", "push", "publish")
LOOK_S = 0.2


def main() -> int:
    """Tie to the parent if there is one, read the environment, serve. Returns the exit code."""
    if parent := os.environ.pop(PARENT_PID, None):
        tie_to_parent(int(parent))
    if sys.argv[1:2] == ["doctor"]:
        from worker.main import examine

        return examine(sys.argv[2:], os.environ)
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument(
        "roles", nargs="+", choices=ROLES, metavar="ROLE", help="check, prepare, train, generate, push or publish"
    )
    parser.add_argument(
        "--slot", type=int, help="of its device, for train: its parent says so (LONGHAUL_TRIALS_AT_ONCE)"
    )
    parser.add_argument("--engine", help="for train: its parent says so (LONGHAUL_ENGINES)")
    parser.add_argument("--healthy", action="store_true", help="serve nothing: exit 0 if they run here and are healthy")
    arguments = parser.parse_args()
    secrets.register(os.environ)
    try:
        settings = from_environment(os.environ)
    except ValueError as error:
        print(f"a setting is wrong: {error}", file=sys.stderr)
        return 2
    logs.configure(settings.log)
    if arguments.healthy:
        return print_health(arguments.roles, settings)
    if len(arguments.roles) > 1:
        return serve_together(arguments.roles, settings)
    return serve(arguments.roles[0], settings, arguments.slot, arguments.engine)


def serve(role: str, settings: WorkerSettings, slot: int | None, engine: str | None = None) -> int:
    """Be one worker until SIGTERM. Returns 2, once the reason is said, when it may not work here.

    `slot`: the only one that a train worker serves, on this machine or of this engine; None: all that there are.
    """
    from jobs.redis.connection import connect
    from jobs.redis.store import Store
    from jobs.state import Stage
    from worker.exports import ExportHandler, PushHandler
    from worker.generation import GenerationHandler
    from worker.heartbeat import first_heartbeat, report
    from worker.main import serve_publish, serve_stage, serve_train
    from worker.requests import serve_requests

    if (why := unwritable(settings.writes(role))) is not None:
        log.error("%s takes no work: %s", role, why)
        # For those who ask how the workers are; it is forgotten in a minute.
        report(Store(connect(settings.redis_url)), first_heartbeat(role, settings).with_health(why))
        return 2
    if role == "publish":
        return serve_publish(settings)
    if role == "train":
        return serve_train(settings, slot, engine)
    if role == "generate":
        return serve_requests(settings, [GenerationHandler(settings), ExportHandler(settings)])
    if role == "push":
        return serve_requests(settings, [PushHandler(settings)], role)
    serve_stage(Stage(role), settings, first_heartbeat(role, settings))
    return 0


def serve_together(roles: Sequence[str], settings: WorkerSettings) -> int:
    """One child per role until SIGTERM or SIGINT. When one ends by itself all end: Docker then restarts them all.

    Their trainers are forked by one process.
    """
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())
    warm = WarmProcess(settings.trainer_environment) if {"check", "prepare"} & set(roles) else None
    warmed = {} if warm is None else {WARM: warm.socket}
    # Process groups of their own: a terminal's Ctrl+C reaches the parent alone, which passes it on once.
    children = {
        role: subprocess.Popen(
            tied_to_parent(sys.executable, "-m", "worker", role),
            env={**secrets.minimal_environment(os.environ, secrets.NEEDED[role]), **warmed},
            process_group=0,
        )
        for role in roles
    }
    while not stop.wait(LOOK_S) and all(child.poll() is None for child in children.values()):
        if warm is not None:
            warm.keep_up()
    asked = stop.is_set()
    if not asked:
        ended = {role: child.returncode for role, child in children.items() if child.returncode is not None}
        log.error("ended unexpectedly: %s; the others are stopped", ended)
    for child in children.values():
        child.terminate()
    for child in children.values():
        child.wait()
    if warm is not None:
        warm.close()
    return 0 if asked else 1


def print_health(roles: Sequence[str], settings: WorkerSettings) -> int:
    """0 when each role, and each GPU of it, has a heartbeat from this machine that calls itself healthy; otherwise 1,
    the reason printed.

    A container's host name is its own, so in one this asks about that container alone.
    """
    from jobs.errors import StoreUnavailable
    from jobs.redis.connection import connect
    from jobs.redis.store import Store
    from jobs.text.units import printable
    from worker.heartbeat import first_heartbeat

    try:
        workers = Store(connect(settings.redis_url)).workers.all()
    except StoreUnavailable as error:
        print(f"no heartbeat can be read: {error}")
        return 1
    for role in roles:
        here = first_heartbeat(role, settings)
        beats = [worker for worker in workers if worker.stage == role and worker.shares_host(here)]
        by_gpu: dict[str | None, list[Worker]] = {}
        for worker in beats:
            by_gpu.setdefault(None if worker.gpu is None else worker.gpu.uuid, []).append(worker)
        sick = [each[-1].why for each in by_gpu.values() if not any(worker.healthy for worker in each)]
        if sick or not beats:
            print(printable(f"{role}: {'; '.join(map(str, sick)) or 'no heartbeat in the last minute'}"))
            return 1
    return 0
