"""What reconcile reads and changes in Redis: the leader, whether Redis was wiped, expired leases."""

from __future__ import annotations

from typing import Any, cast

import redis

from jobs.redis.connection import Scripts, reachable
from jobs.redis.scripts import HELPERS, job_key

# → list of id, token of leases that have run out
EXPIRED = """
local out = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', 'longhaul:leases', '-inf', now())) do
  table.insert(out, id)
  table.insert(out, redis.call('HGET', lj(id), 'lease') or '')
end
return out
"""

# ARGV: id, token seen → how often a lease of this stage has run out, or 0 if it was renewed in between
EXPIRE = """
local id = ARGV[1]
local until_ms = redis.call('ZSCORE', 'longhaul:leases', id)
if not until_ms then  -- sent twice: the first one did it
  if redis.call('HGET', lj(id), 'expired_token') == ARGV[2] then
    return tonumber(redis.call('HGET', lj(id), 'expired_count'))
  end
  return 0
end
if tonumber(until_ms) > now() then return 0 end
if (redis.call('HGET', lj(id), 'lease') or '') ~= ARGV[2] then return 0 end
redis.call('HDEL', lj(id), 'lease')
redis.call('ZREM', 'longhaul:leases', id)
local stage = redis.call('HGET', lj(id), 'stage') or ''
if redis.call('HGET', lj(id), 'expired_stage') ~= stage then
  redis.call('HSET', lj(id), 'expired_stage', stage, 'expired_count', 0)
end
redis.call('HSET', lj(id), 'expired_token', ARGV[2])
local count = redis.call('HINCRBY', lj(id), 'expired_count', 1)
place(id)
return count
"""

# ARGV: token → 1 Redis was wiped and knows only what it was sent since: send it everything, then END_REBUILD
BEGIN_REBUILD = """
if rebuilt() then return 0 end
redis.call('SET', 'longhaul:rebuilt', ARGV[1])
return 1
"""

# ARGV: token → 1 done, 0 not: it was wiped again in between, or another has begun
END_REBUILD = """
local now = redis.call('GET', 'longhaul:rebuilt')
if now == ARGV[1] then redis.call('SET', 'longhaul:rebuilt', 'yes') end
if now == ARGV[1] or now == 'yes' then return 1 end
return 0
"""

# ARGV: token → 1: it does not lead any more
RESIGN = """
if redis.call('GET', 'longhaul:reconcile') == ARGV[1] then redis.call('DEL', 'longhaul:reconcile') end
return 1
"""

# ARGV: token, ms → 1 this one leads, 0 another does
LEAD = """
local key = 'longhaul:reconcile'
redis.call('SET', key, ARGV[1], 'NX', 'PX', ARGV[2])
if redis.call('GET', key) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', key, ARGV[2])
return 1
"""


class Maintenance:
    """What a reconciler does. Raises StoreUnavailable if Redis does not answer."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._script = Scripts(client, HELPERS)

    def lead(self, token: str, ttl_ms: int) -> bool:
        """Whether this reconciler is the active one."""
        return bool(self._script(LEAD, token, ttl_ms))

    def resign(self, token: str) -> None:
        """Let another reconciler lead at once."""
        self._script(RESIGN, token)

    def uptime_s(self) -> float:
        """Seconds since Redis started."""
        with reachable():
            return float(cast(Any, self._redis.info("server"))["uptime_in_seconds"])

    def begin_rebuild(self, token: str) -> bool:
        """Whether Redis was wiped (or is new) and has to be given every run directory; then `end_rebuild` follows."""
        return bool(self._script(BEGIN_REBUILD, token))

    def wiped(self) -> bool:
        """Whether Redis must be filled from the run directories, or is being filled."""
        with reachable():
            return self._redis.get("longhaul:rebuilt") != b"yes"

    def end_rebuild(self, token: str) -> bool:
        """Redis knows every job again. False: it was wiped again in the meantime."""
        return bool(self._script(END_REBUILD, token))

    def name_runs(self, identity: str) -> None:
        """The runs directory whose jobs these are."""
        with reachable():
            self._redis.set("longhaul:folder", identity)

    def runs_name(self) -> str | None:
        """What `name_runs` was told last; None: nothing yet."""
        with reachable():
            found = cast(bytes | None, self._redis.get("longhaul:folder"))
        return None if found is None else found.decode()

    def known(self) -> set[str]:
        """Ids of all jobs that Redis has heard of."""
        with reachable():
            return {each.decode() for each in cast(list[bytes], self._redis.zrange("longhaul:jobs", 0, -1))}

    def leased(self, job: str) -> bool:
        """Whether anybody holds the job."""
        with reachable():
            return bool(self._redis.hexists(job_key(job), "lease"))

    def expired(self) -> list[tuple[str, str]]:
        """(id, token) of leases that have run out."""
        flat = [item.decode() for item in self._script(EXPIRED)]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def expire(self, job: str, token: str) -> int:
        """Drop an expired lease. Returns how often that has happened in this stage; 0: it was renewed in time."""
        return int(self._script(EXPIRE, job, token))
