"""Figures about all jobs that Redis can give without looking at each of them."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from jobs.metrics import MetricRow
from jobs.record import JobRecord
from jobs.redis.connection import Scripts
from jobs.redis.queries import WHOLE
from jobs.redis.scripts import HELPERS
from jobs.redis.store import read_record
from jobs.state import DAMAGED, Stage, Status

MOST_RUNNING = 100
"""At most this many running jobs are read one by one; there is one per GPU."""

# ARGV: running jobs at most, statuses, '', stages
# → {{jobs of each status}, {waiting, ms that the oldest has waited, …}, {record, newest row, …}}
# An order is by priority, then by time: its oldest is the first of one of the (at most 201) priorities.
_STANDING = """
whole()
local jobs, queues, running = {}, {}, {}
local i = 2
while ARGV[i] ~= '' do
  table.insert(jobs, redis.call('ZCARD', 'longhaul:status:' .. ARGV[i]))
  i = i + 1
end
for stage = i + 1, #ARGV do
  local order = 'longhaul:order:' .. ARGV[stage]
  local at = now()
  local oldest, from = at, '-inf'
  while true do
    local first = redis.call('ZRANGEBYSCORE', order, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if #first == 0 then break end
    local band = math.floor(tonumber(first[2]) / 1e13)
    oldest = math.min(oldest, tonumber(first[2]) - band * 1e13)
    from = string.format('%.0f', (band + 1) * 1e13)
  end
  table.insert(queues, redis.call('ZCARD', order))
  table.insert(queues, at - oldest)
end
for _, id in ipairs(redis.call('ZRANGE', 'longhaul:status:running', 0, ARGV[1] - 1)) do
  table.insert(running, redis.call('HGET', lj(id), 'record') or '')
  table.insert(running, redis.call('HGET', lj(id) .. ':latest', 'row') or '')
end
return {jobs, queues, running}
"""


@dataclass(frozen=True)
class Queue:
    """Jobs that wait for one stage."""

    length: int
    oldest_s: float
    """Seconds since the oldest waiting job was submitted; 0 if none waits."""


@dataclass(frozen=True)
class Snapshot:
    """All figures at one moment."""

    jobs: dict[str, int]
    """By state, and DAMAGED."""
    queues: dict[Stage, Queue]
    running: list[tuple[JobRecord, MetricRow | None]]
    """Running jobs, oldest first, each with its newest row of metrics."""


class Gauges:
    """Reads the figures, at a cost that does not grow with the number of jobs. Raises StoreUnavailable.

    Raises Recovering while Redis does not know all jobs: the figures would cover only some.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._call = Scripts(client, HELPERS + WHOLE)

    def read(self) -> Snapshot:
        """The figures now."""
        statuses, stages = [*(status.value for status in Status), DAMAGED], [stage.value for stage in Stage]
        jobs, queues, running = self._call(_STANDING, MOST_RUNNING, *statuses, "", *stages)
        return Snapshot(
            jobs=dict(zip(statuses, jobs, strict=True)),
            queues={
                stage: Queue(length, waited / 1000)
                for stage, length, waited in zip(Stage, queues[::2], queues[1::2], strict=True)
            },
            running=[
                (read_record(record), MetricRow.model_validate_json(row) if row else None)
                for record, row in zip(running[::2], running[1::2], strict=True)
                if record
            ],
        )
