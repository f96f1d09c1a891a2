"""The workers: heartbeats of worker processes by name, and the job that each works on.

`longhaul:workers` has the names by the time of the last heartbeat, `longhaul:worker:<name>` that heartbeat. The token
of a lease begins with its holder's name, so who works on which job is known, and as current as the lease.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid

import redis
from pydantic import ValidationError
from pydantic_core import from_json

from jobs.errors import WorkerMissing
from jobs.heartbeat import Worker, WorkerHeartbeat
from jobs.redis.connection import Scripts, reachable
from jobs.redis.scripts import HELPERS

log = logging.getLogger("longhaul.workers")
FORGOTTEN_MS = 60_000
"""Without a heartbeat for this long a worker counts as gone."""

# ARGV: name, what it says, ms until it is forgotten → now (ms)
_REPORT = """
redis.call('SET', 'longhaul:worker:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', 'longhaul:workers', now(), ARGV[1])
redis.call('ZREMRANGEBYSCORE', 'longhaul:workers', '-inf', now() - ARGV[3])
return now()
"""

# ARGV: ms until a worker is forgotten → {now (ms), {name, heard (ms), its heartbeat ('' if it sent none), …},
# {id, token of each lease, …}}
_WORKERS = """
local reports = {}
local names = redis.call('ZRANGEBYSCORE', 'longhaul:workers', now() - ARGV[1], '+inf', 'WITHSCORES')
for i = 1, #names, 2 do
  local raw = redis.pcall('GET', 'longhaul:worker:' .. names[i])
  if type(raw) ~= 'string' then raw = '' end
  for _, each in ipairs({names[i], names[i + 1], raw}) do table.insert(reports, each) end
end
local held = {}
for _, id in ipairs(redis.call('ZRANGE', 'longhaul:leases', 0, -1)) do
  table.insert(held, id)
  table.insert(held, redis.call('HGET', lj(id), 'lease') or '')
end
return {now(), reports, held}
"""


class Workers:
    """Reports and reads heartbeats. Raises StoreUnavailable when Redis does not answer."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._call = Scripts(client, HELPERS)

    def report(self, heartbeat: WorkerHeartbeat) -> float:
        """Store a worker's heartbeat; it is forgotten after a minute. Returns the time of Redis, Unix seconds."""
        report = json.dumps(heartbeat.model_dump(exclude_unset=True))
        return float(self._call(_REPORT, heartbeat.name, report, FORGOTTEN_MS)) / 1000

    def forget(self, name: str) -> None:
        """Remove a worker that has signed off."""
        with reachable():
            self._redis.delete(f"longhaul:worker:{name}")
            self._redis.zrem("longhaul:workers", name)

    def all(self) -> list[Worker]:
        """Workers heard of in the last minute, by name. An invalid heartbeat is logged and skipped."""
        now, reports, held = self._call(_WORKERS, FORGOTTEN_MS)
        leases = {
            worker: (job.decode(), since)
            for job, (worker, since) in zip(held[::2], map(_holder, held[1::2]), strict=True)
        }
        found = []
        for raw_name, heard, raw in sorted(zip(reports[::3], reports[1::3], reports[2::3], strict=True)):
            name = raw_name.decode(errors="replace")
            job, since = leases.get(name, (None, None))
            seen, age = float(heard) / 1000, (now - float(heard)) / 1000
            try:
                found.append(_worker(raw, job=job, job_since=since, last_seen_at=seen, heartbeat_age_s=age))
            except ValueError as error:
                log.warning("%r is not a worker's heartbeat and is skipped: %s", name, error)
        return found

    def since_heard(self, role: str) -> float:
        """Seconds since the newest heartbeat of a healthy worker of this role; infinite: none in the last minute."""
        ages = (worker.heartbeat_age_s for worker in self.all() if worker.stage == role and worker.healthy)
        return min(ages, default=math.inf)

    def require(self, role: str) -> None:
        """Raises WorkerMissing where no healthy worker of this role was heard of in the last minute."""
        if math.isinf(self.since_heard(role)):
            raise self.missing(role)

    def missing(self, role: str) -> WorkerMissing:
        """The error where no worker of this role can work, with the reason that one gave."""
        why = next((f": {worker.why}" for worker in self.all() if worker.stage == role and worker.why), "")
        return WorkerMissing(
            f"no worker `{role}` is there to do it{why}",
            hint=f"`longhaul local` and compose start one; by hand it is `python -m worker {role}`",
        )


def lease_token(worker: str) -> str:
    """A new token for this worker's lease, which begins now. `all` reads from it who holds a job, and since when."""
    return f"{worker}/{int(time.time())}/{uuid.uuid4().hex}"


def _holder(token: bytes) -> tuple[str, int | None]:
    """(name of the worker, since when) from a lease's token; ("", None) if it has neither."""
    worker, _, rest = token.decode(errors="replace").rpartition("/")[0].rpartition("/")
    return (worker, int(rest)) if rest.isdecimal() and len(rest) < 16 else ("", None)


def _worker(raw: bytes, **seen: str | float | None) -> Worker:
    """What a worker reported, and what Redis knows of it. Raises ValueError if that is no heartbeat."""
    facts = from_json(raw, allow_inf_nan=False)
    json.dumps(facts, allow_nan=False)  # ValueError: 1e999 is read as infinity, and no answer can hold that
    try:
        return Worker.model_validate({**facts, **seen} if isinstance(facts, dict) else facts)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
