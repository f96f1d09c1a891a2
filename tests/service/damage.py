"""Damage to run directories, and who finds it."""

from __future__ import annotations

from jobs.disk.rundir import RunDir
from jobs.redis.connection import Tickets, connect
from tests.service.running import Service
from tests.support.samples import QUEUED
from worker.reconcile import Reconciler


def destroyed_line(run: RunDir) -> None:
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * (len(lines[2]) - 1) + b"\n"
    run.events_file.write_bytes(b"".join(lines))


def no_events(run: RunDir) -> None:
    run.events_file.unlink()


def half_a_spec(run: RunDir) -> None:
    run.spec_file.write_bytes(run.spec_file.read_bytes()[:100])


def half_a_plan(run: RunDir) -> None:
    run.plan_file.write_text('{"steps": ')


def reconciler(service: Service) -> Reconciler:
    return Reconciler(service.settings.runs, service.store, Tickets(connect(service.settings.redis_url)))


def queued(service: Service, **more: object) -> str:
    job = service.submit(**more)
    service.append(job, *QUEUED)
    return job


def destroyed(run: RunDir, line: int) -> bytes:
    lines = run.events_file.read_bytes().splitlines(keepends=True)
    lines[line - 1] = lines[line - 1][:20] + b"\x00" * 5 + lines[line - 1][25:]
    damaged = b"".join(lines)
    run.events_file.write_bytes(damaged)
    return damaged
