"""The Lua that reads jobs: one, several, or a page of a filtered list, with queue places and estimates.

A query reads the jobs that it returns, those that a filter skips and, if one of them waits for a GPU, the first 100
that do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.data_names import uploaded_name
from jobs.redis.connection import RECOVERING


@dataclass(frozen=True)
class Filter:
    """Which jobs are listed: those in one of `statuses` (empty: all) that have one of the values for each key, that are
    dry runs or not, and trials or not."""

    statuses: Collection[str] = ()
    """Of `jobs.state.Status`, or DAMAGED."""
    metadata: Mapping[str, Collection[str]] = field(default_factory=dict)
    dry_run: bool | None = None
    """None: both."""
    sweep: str | None = None
    """Only trials of this sweep."""
    trials: bool = True
    """Whether trials of sweeps are listed, too."""

    def groups(self) -> list[list[str]]:
        """Names of indexes; a job has to be in one of each group."""
        by_status = [[status_index(each) for each in sorted(set(self.statuses))]] if self.statuses else []
        by_label = [
            [metadata_index(key, value) for value in sorted(set(values))] for key, values in self.metadata.items()
        ]
        of_sweep = [[sweep_index(self.sweep)]] if self.sweep else []
        return by_status + by_label + of_sweep + ([[DRY_RUNS]] if self.dry_run else [])

    @property
    def excluded(self) -> list[str]:
        """Names of indexes that a job must not be in."""
        return [DRY_RUNS] * (self.dry_run is False) + [TRIALS] * (not self.trials and self.sweep is None)


EVERY_JOB = Filter()
DRY_RUNS = "dry_runs"
"""Index of jobs that are only checked."""
TRIALS = "trials"
"""Index of the trials of all sweeps."""


def status_index(status: str) -> str:
    """Jobs that are in this state, or DAMAGED."""
    return f"status:{status}"


def metadata_index(key: str, value: str) -> str:
    """Jobs with this label."""
    return f"metadata:{json.dumps([key, value])}"


def dataset_index(name: str) -> str:
    """Jobs whose rows are in this uploaded data set."""
    return f"dataset:{name}"


def sweep_index(sweep: str) -> str:
    """Trials of this sweep."""
    return f"sweep:{sweep}"


def lasting_indexes(
    metadata: Mapping[str, str], data: Mapping[str, Any], *, dry_run: bool, sweep: str | None = None
) -> list[str]:
    """Indexes that a job is in whatever its state. `data`: that part of its specification."""
    train = data["train"] if isinstance(data["train"], list) else [{"source": data["train"]}]
    names = [*(each["source"] for each in train), data["validation"]]
    named = [uploaded_name(each) for each in names if isinstance(each, str)]
    datasets = sorted({name for name in named if name is not None})
    labels = [metadata_index(*label) for label in metadata.items()]
    trials = [] if sweep is None else [TRIALS, sweep_index(sweep)]
    return labels + [dataset_index(name) for name in datasets] + [DRY_RUNS] * dry_run + trials


# After `HELPERS`: `whole()` ends the script with an error that `jobs.redis.connection.reachable` knows, unless Redis
# knows all jobs. What is true of some of them must not be shown as if it were of all.
WHOLE = f"""
local function whole()
  if not rebuilt() then error('{RECOVERING}') end
end
"""

# Before the scripts below, after these:
#
# - `shown(id)`: {id, record, spec, newest row of metrics, jobs before it or -1, start, finish, damage, reports,
#   in_work, what its process does}, as in `jobs.redis.store.RawJob`; nothing: no job. Start and finish are Unix ms, ''
#   if unknown and for a job that does not wait for a GPU
# - `in_work(stage)`: of *check* and *prepare* the job that a worker has had longest, and for how many whole
#   minutes; '': none for a minute
# - `reports()`: heartbeats of train workers in one JSON list
# - `needs(id)`: ms that it still needs, as `jobs/record.py` says; and, if there is one, the Unix ms of the row of
#   metrics from which they count
# - `estimate()`: the same two by id, for the first jobs that wait for a GPU, from what each is expected to need, what
#   those on a GPU have left, and which GPUs train workers have: each job takes the one that is free first, of those
#   that suit it. Later jobs are left out from the first on of which nobody knows how long it takes
SHOWN = """
local MAX_ESTIMATED = 100  -- a job with more before it has no estimate: it would be a guess
local function newest(id)
  local row = redis.call('HGET', lj(id) .. ':latest', 'row')
  return row and cjson.decode(row)
end
local function needs(id)
  local planned, row = tonumber(redis.call('HGET', lj(id), 'needs_ms') or ''), newest(id)
  if not row or planned == 0 then return planned end
  local record = cjson.decode(redis.call('HGET', lj(id), 'record'))
  if record.attempt_open and row.attempt == record.attempt then return row.eta_s * 1000, row.at * 1000 end
  local steps = tonumber(record.steps)
  if not steps then return planned end
  local pace = row.step < steps and row.eta_s / (steps - row.step) or row.step_s
  return pace * (steps - record.progress_step) * 1000
end
local function on_gpus()
  local ids = redis.call('ZRANGE', 'longhaul:status:running', 0, -1)
  for _, id in ipairs(redis.call('ZRANGE', 'longhaul:leases', 0, -1)) do
    if redis.call('HGET', lj(id), 'status') == 'queued' then table.insert(ids, id) end
  end
  return ids
end
local function same_gpu(one, other) return one.gpu and other.gpu and one.gpu.uuid == other.gpu.uuid end
local function estimate()
  local from, busy, idle, slots = now(), {}, {}, {}
  for _, worker in ipairs(trainers()) do
    if worker.job then busy[worker.job] = worker elseif worker.healthy then table.insert(idle, worker) end
  end
  for _, id in ipairs(on_gpus()) do
    local needed, at = needs(id)
    if not needed then return {} end
    local began = tonumber(redis.call('HGET', lj(id), 'began_ms') or '') or from
    -- Where nobody holds it (Redis was just rebuilt) one of the idle ones has it.
    local worker = busy[id] or table.remove(idle, 1) or {any = true}
    table.insert(slots, {at = math.max(from, math.max(began, at or 0) + needed), gpu = worker.gpu, any = worker.any,
                         slot = worker.slot or 0, engine = worker.engine})
  end
  for _, worker in ipairs(idle) do
    table.insert(slots, {at = from, gpu = worker.gpu, slot = worker.slot, engine = worker.engine})
  end
  if #slots == 0 then return {} end
  local expected = {}
  for _, id in ipairs(redis.call('ZRANGE', 'longhaul:order:train', 0, MAX_ESTIMATED)) do
    local needed, slot = needs(id), nil
    local alone, best = not is_trial(id), nil
    for _, each in ipairs(slots) do
      local free = each.at
      for _, other in ipairs(alone and slots or {}) do
        if same_gpu(each, other) then free = math.max(free, other.at) end
      end
      local takes = (each.slot == 0 or not alone) and (each.any or suits(id, each))
      if takes and (not slot or free < best) then slot, best = each, free end
    end
    if slot then
      local start = math.max(best, tonumber(redis.call('HGET', lj(id), 'not_before') or '0'))
      expected[id] = {string.format('%.0f', start), needed and string.format('%.0f', start + needed) or ''}
      if not needed then return expected end
      for _, other in ipairs(slots) do
        if other == slot or (alone and same_gpu(slot, other)) then other.at = start + needed end
      end
    end
  end
  return expected
end
local reported
local function reports()
  if not reported then
    reported = {}
    local seen = {}  -- slots of one GPU report alike
    for _, worker in ipairs(trainers()) do
      local text = cjson.encode({device = worker.device, gpu = worker.gpu, engine = worker.engine})
      if not seen[text] then table.insert(reported, text) end
      seen[text] = true
    end
    table.sort(reported)  -- by now in the order of their heartbeats
    reported = '[' .. table.concat(reported, ',') .. ']'
  end
  return reported
end
local longest = {}
local function in_work(stage)
  if not longest[stage] then
    longest[stage] = ''
    local since = now() - 60000
    for _, id in ipairs(redis.call('ZRANGE', 'longhaul:leases', 0, -1)) do
      local h = redis.call('HMGET', lj(id), 'stage', 'lease')
      local at = (tonumber(string.match(h[2] or '', '/(%d+)/%x+$')) or since / 1000 + 1) * 1000
      if h[1] == stage and at <= since then
        since, longest[stage] = at, id .. ' ' .. math.floor((now() - at) / 60000)
      end
    end
  end
  return longest[stage]
end
local expected
local function shown(id)
  local h = redis.call('HMGET', lj(id), 'record', 'spec', 'stage', 'damaged', 'status')
  if not h[1] then return nil end
  local rank = redis.call('ZRANK', 'longhaul:order:' .. (h[3] or ''), id)
  local times = {'', ''}
  if rank and h[3] == 'train' and rank <= MAX_ESTIMATED then
    expected = expected or estimate()
    times = expected[id] or times
  end
  local latest = redis.call('HMGET', lj(id) .. ':latest', 'row', 'activity')
  local ended = h[5] == 'succeeded' or h[5] == 'failed' or h[5] == 'cancelled'
  return {id, h[1], h[2] or '{}', latest[1] or '', rank or -1, times[1], times[2], h[4] or '',
          ended and '' or reports(), rank and h[5] == 'validating' and in_work(h[3]) or '', latest[2] or ''}
end
"""

# ARGV: id → what `shown` says of it, or nothing
SHOW = """
whole()
return shown(ARGV[1])
"""

# ARGV: id that the page follows ('' for the first page), limit, JSON of the groups of indexes, JSON of the indexes that
# are left out → {1 if there is more, jobs}; nothing: no job has that id. The smallest group is walked, newest first,
# and what is not in the others is passed over. The order is that of longhaul:jobs, so it does not matter where the job
# that the page follows has gone meanwhile.
LIST = """
whole()
local after, limit, groups, excluded = ARGV[1], tonumber(ARGV[2]), cjson.decode(ARGV[3]), cjson.decode(ARGV[4])
local cursor, score = -1, '+inf'
if after ~= '' then
  cursor, score = redis.call('ZREVRANK', 'longhaul:jobs', after), redis.call('ZSCORE', 'longhaul:jobs', after)
  if not cursor then return false end
end
local smallest, least = 0, nil
for number, group in ipairs(groups) do
  local size = 0
  for _, index in ipairs(group) do size = size + redis.call('ZCARD', 'longhaul:' .. index) end
  if not least or size < least then smallest, least = number, size end
end
local function rank(id) return redis.call('ZREVRANK', 'longhaul:jobs', id) end
local function place_after_cursor(key)
  if cursor == -1 then return 0 end
  local place = redis.call('ZCOUNT', key, '(' .. score, '+inf')
  for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', key, score, score)) do
    if rank(id) > cursor then break end
    place = place + 1
  end
  return place
end
local walks = {}
local function go_on(walk)
  walk.id = redis.call('ZREVRANGE', walk.key, walk.next, walk.next)[1]
  walk.rank = walk.id and rank(walk.id)
  walk.next = walk.next + 1
end
for _, index in ipairs(groups[smallest] or {'jobs'}) do
  local key = 'longhaul:' .. index
  table.insert(walks, {key = key, next = place_after_cursor(key)})
end
for _, walk in ipairs(walks) do go_on(walk) end
local function fits(id)
  for _, index in ipairs(excluded) do
    if redis.call('ZSCORE', 'longhaul:' .. index, id) then return false end
  end
  for number, group in ipairs(groups) do
    local found = number == smallest
    for _, index in ipairs(group) do found = found or redis.call('ZSCORE', 'longhaul:' .. index, id) end
    if not found then return false end
  end
  return true
end
local page = {}
while true do
  local first
  for _, walk in ipairs(walks) do
    if walk.id and (not first or walk.rank < first.rank) then first = walk end
  end
  if not first then return {0, page} end
  if fits(first.id) then
    if #page == limit then return {1, page} end
    table.insert(page, shown(first.id))
  end
  go_on(first)
end
"""

# ARGV: index → ids and states of its jobs, in turn, newest first
MEMBERS = """
whole()
local found = {}
for _, id in ipairs(redis.call('ZREVRANGE', 'longhaul:' .. ARGV[1], 0, -1)) do
  table.insert(found, id)
  table.insert(found, redis.call('HGET', lj(id), 'status'))
end
return found
"""
