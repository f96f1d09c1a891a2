"""The Lua scripts on Redis. Each is safe to send twice: seeing its own effect (or token) is success.

All instants come from TIME inside the script. Reconcile's own: `maintenance.py`. `HELPERS` comes before each:

- `lj`: key of a job's hash; fields: number, record, spec, status, stage, score, not_before, needs_ms (what is left of
  it, '' where nobody knows), began_ms (its attempt, '' where none runs), indexes (JSON: in which it is whatever its
  state), gpu_memory_gib, gpu_name (lower case), least_bytes, native_bf16 (`jobs/gpu_needs.py`; '' where any will do),
  engine ('': none), host_bytes ('': none), trial ('1': of a sweep), reserved_bytes (what a trial has of a GPU; '':
  unknown, so all of it), on_gpu (the UUID of the GPU of an open attempt), lease (its holder's token), damaged (JSON of
  what is wrong with its directory, where something is)
- `rebuilt()`: whether Redis has been given every run directory since it was last empty (`jobs/redis/maintenance.py`)
- `place(id)`: puts a job into the order of its stage when it waits and nobody holds it, and out of all others
- `suits(id, worker)`: whether a worker of that engine (nil: none) with that GPU (name, memory_bytes, native_bf16,
  count, host_memory_bytes; nil: a CPU) can take the job, as `jobs/gpu_needs.py` says
- `trainers()`: what train workers of the last minute report, each with the `job` that it holds
- `beside(gpu, trainers)`: the jobs that these hold on that GPU, and those that are running there: when Redis was just
  rebuilt, nobody holds them
- `first_due(stage, look)`: the first job of that order whose time has come and for which `look`, if given, is true
- `next_job(worker, on, taken)`: the job that a train worker may start beside those `on` its GPU, unless it is `taken`
"""

from __future__ import annotations

from jobs import gpus

HELPERS = (
    f"local DRIVER_BYTES, HOST_ROOM, MARGIN = {gpus.DRIVER_BYTES}, {gpus.HOST_ROOM}, {gpus.MARGIN}"
    + """
local function lj(id) return 'longhaul:job:' .. id end
local function now() local t = redis.call('TIME'); return t[1] * 1000 + math.floor(t[2] / 1000) end
local function rebuilt() return redis.call('GET', 'longhaul:rebuilt') == 'yes' end
local function place(id)
  local h = redis.call('HMGET', lj(id), 'status', 'stage', 'score', 'lease', 'damaged')
  local waits = (h[1] == 'validating' or h[1] == 'queued') and not h[4] and not h[5]
  for _, stage in ipairs({'check', 'prepare', 'train'}) do
    if waits and stage == h[2] then redis.call('ZADD', 'longhaul:order:' .. stage, h[3], id)
    else redis.call('ZREM', 'longhaul:order:' .. stage, id) end
  end
end
local function drop_lease(id, token)
  if redis.call('HGET', lj(id), 'lease') == token then
    redis.call('HDEL', lj(id), 'lease')
    redis.call('ZREM', 'longhaul:leases', id)
    return 1
  end
  return 0
end
local function asks(id)
  local h = redis.call('HMGET', lj(id), 'gpu_memory_gib', 'gpu_name', 'least_bytes', 'native_bf16', 'gpus', 'engine',
    'host_bytes')
  local record = not h[3] and redis.call('HGET', lj(id), 'record')
  if record then  -- written by an earlier version: the peak of its plan stands for the least
    local plan = cjson.decode(record).plan
    local memory = type(plan) == 'table' and plan.memory
    h[3] = type(memory) == 'table' and memory.device == 'cuda' and string.format('%.0f', memory.peak_bytes) or ''
  end
  -- Earlier versions knew bf16 alone, one GPU (or 'auto'), no engine, and no needs of the host's memory.
  return h[1] or '', h[2] or '', h[3], h[4] or '1', tonumber(h[5]) and h[5] or '1', h[6] or '', h[7] or ''
end
local function room(gpu)
  local usable = gpu.memory_bytes - DRIVER_BYTES
  return usable - math.floor(MARGIN * usable)
end
local function words(name) return '[^%w]' .. name:gsub('%p', '%%%0') .. '[^%w]' end
local function suits(id, worker)
  local gib, name, least, bf16, gpus, engine, host = asks(id)
  local gpu = worker.gpu
  if engine ~= (worker.engine or '') then return false end
  gib, least, host = tonumber(gib), tonumber(least), tonumber(host)
  if not gpu then return not gib and name == '' end
  return (not gib or math.ceil(gpu.memory_bytes / 2^30) >= gib)
    and (name == '' or string.find(' ' .. string.lower(gpu.name) .. ' ', words(name)) ~= nil)
    and (not least or room(gpu) >= least)
    and (bf16 == '' or gpu.native_bf16 ~= false)
    and (gpu.count or 1) >= tonumber(gpus)
    and (not host or not tonumber(gpu.host_memory_bytes) or gpu.host_memory_bytes - HOST_ROOM >= host)
end
local function finite(value)  -- what cjson can write, and every reader of JSON reads exactly
  local number = tonumber(value)
  return number and number == number and math.abs(number) < 2^53 and number or nil
end
local function trainers()
  local held, found = {}, {}
  for _, id in ipairs(redis.call('ZRANGE', 'longhaul:leases', 0, -1)) do
    local holder = string.match(redis.call('HGET', lj(id), 'lease') or '', '^(.*)/%d+/%x+$')
    if holder then held[holder] = id end
  end
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', 'longhaul:workers', now() - 60000, '+inf')) do
    local raw = redis.pcall('GET', 'longhaul:worker:' .. name)
    local read, facts = pcall(cjson.decode, type(raw) == 'string' and raw or '')
    if read and type(facts) == 'table' and facts.stage == 'train' then
      local gpu = facts.gpu
      local known = type(gpu) == 'table' and type(gpu.name) == 'string' and finite(gpu.memory_bytes)
      gpu = known and {uuid = gpu.uuid, name = gpu.name, memory_bytes = finite(gpu.memory_bytes),
                       native_bf16 = gpu.native_bf16, count = finite(gpu.count),
                       host_memory_bytes = finite(gpu.host_memory_bytes)} or nil
      table.insert(found, {healthy = facts.healthy == true, device = facts.device, gpu = gpu, job = held[name],
                           slot = finite(facts.slot) or 0,
                           engine = type(facts.engine) == 'string' and facts.engine or nil})
    end
  end
  return found
end
local function beside(gpu, workers)
  local on, seen = {}, {}
  local function add(id)
    if not seen[id] then table.insert(on, id) end
    seen[id] = true
  end
  if not gpu then return on end
  for _, worker in ipairs(workers) do
    if worker.job and worker.gpu and worker.gpu.uuid == gpu.uuid then add(worker.job) end
  end
  for _, id in ipairs(redis.call('ZRANGE', 'longhaul:status:running', 0, -1)) do
    if redis.call('HGET', lj(id), 'on_gpu') == gpu.uuid then add(id) end
  end
  return on
end
local function is_trial(id) return redis.call('HGET', lj(id), 'trial') == '1' end
local function reserves(id) return is_trial(id) and tonumber(redis.call('HGET', lj(id), 'reserved_bytes')) end
local function may_start(id, worker, on)
  if not is_trial(id) then return worker.slot == 0 and #on == 0 end
  if #on == 0 then return true end
  local bytes = 0
  for _, each in ipairs({id, unpack(on)}) do
    local reserved = reserves(each)
    if not reserved then return false end
    bytes = bytes + reserved
  end
  return bytes <= room(worker.gpu)
end
local function first_due(stage, look)
  local first = 0
  while true do
    local ids = redis.call('ZRANGE', 'longhaul:order:' .. stage, first, first + 99)
    for _, id in ipairs(ids) do
      local due = tonumber(redis.call('HGET', lj(id), 'not_before') or '0') <= now()
      if due and (not look or look(id)) then return id end
    end
    if #ids < 100 then return nil end
    first = first + 100
  end
end
local function next_job(worker, on, taken)
  local id = first_due('train', function(each)
    -- On a GPU also one that waits until others leave it: none behind it goes first.
    return not taken[each] and suits(each, worker) and (worker.gpu or may_start(each, worker, on))
  end)
  return id and may_start(id, worker, on) and id or nil
end
"""
)

# ARGV: key, id, body hash, seconds to keep, 1 if the caller has looked on disk → {id, body hash} of the first caller;
# or nothing: the key is unknown, but Redis may have forgotten it (see BEGIN_REBUILD)
RESERVE = """
local key = 'longhaul:idempotency:' .. ARGV[1]
if ARGV[5] == '0' and redis.call('EXISTS', key) == 0 and not rebuilt() then
  return {}
end
redis.call('HSETNX', key, 'job', ARGV[2])
if redis.call('HGET', key, 'job') == ARGV[2] then
  redis.call('HSET', key, 'body', ARGV[3])
  redis.call('EXPIRE', key, ARGV[4])
end
return redis.call('HMGET', key, 'job', 'body')
"""

# ARGV: id, number before, number after, record, status, stage, score, not before (ms), submitted (ms), spec,
#       JSON of its lasting indexes (with a spec), needs (ms), began (ms), token to release ('' for none), JSON of what
#       it asks of a GPU (with a spec), least_bytes, native_bf16, trial, reserved_bytes, on_gpu, host_bytes,
#       then pairs number, event
# → {number that Redis has, 1 if there was a gap}
# For a job that is new to Redis, only its newest event is published: followers read the earlier ones themselves.
PROJECT = """
local id = ARGV[1]
local job = lj(id)
local have = tonumber(redis.call('HGET', job, 'number') or '0')
local before, after = tonumber(ARGV[2]), tonumber(ARGV[3])
if have < before then return {have, 1} end
if have < after then
  if have == 0 then redis.call('DEL', job .. ':events') end  -- what a lost hash left behind
  for i = 22, #ARGV, 2 do
    if tonumber(ARGV[i]) > have then
      redis.call('XADD', job .. ':events', ARGV[i] .. '-0', 'event', ARGV[i + 1])
      if have > 0 or i == #ARGV - 1 then
        redis.call('XADD', 'longhaul:events', 'MAXLEN', '~', 10000, '*', 'job', id, 'event', ARGV[i + 1])
      end
    end
  end
  local old = redis.call('HGET', job, 'status')
  if old then redis.call('ZREM', 'longhaul:status:' .. old, id) end
  redis.call('HSET', job, 'number', after, 'record', ARGV[4], 'status', ARGV[5], 'stage', ARGV[6], 'score', ARGV[7],
             'not_before', ARGV[8], 'needs_ms', ARGV[12], 'began_ms', ARGV[13], 'least_bytes', ARGV[16],
             'native_bf16', ARGV[17], 'trial', ARGV[18], 'reserved_bytes', ARGV[19], 'on_gpu', ARGV[20],
             'host_bytes', ARGV[21])
  if ARGV[10] ~= '' then
    local asks = cjson.decode(ARGV[15])
    redis.call('HSET', job, 'spec', ARGV[10], 'indexes', ARGV[11], 'gpu_memory_gib', asks[1], 'gpu_name', asks[2],
      'gpus', asks[3], 'engine', asks[4])
    for _, index in ipairs(cjson.decode(ARGV[11])) do redis.call('ZADD', 'longhaul:' .. index, ARGV[9], id) end
  end
  redis.call('ZADD', 'longhaul:jobs', ARGV[9], id)
  local shown = redis.call('HEXISTS', job, 'damaged') == 1 and 'damaged' or ARGV[5]
  redis.call('ZADD', 'longhaul:status:' .. shown, ARGV[9], id)
  have = after
end
if ARGV[14] ~= '' then drop_lease(id, ARGV[14]) end
place(id)
return {have, 0}
"""

# ARGV: stage, token, lease (ms), JSON of the train worker (gpu, slot) → id, or nothing. The first of the order whose
# time has come and, to train, that may start there (`next_job`); nobody's, as long as Redis does not know all jobs: one
# of higher priority may be among the others.
CLAIM = """
local mine = 'longhaul:claim:' .. ARGV[2]
local earlier = redis.call('GET', mine)
if earlier then return earlier end
if not rebuilt() then return false end
local worker = cjson.decode(ARGV[4])
if worker.gpu == cjson.null then worker.gpu = nil end
if worker.engine == cjson.null then worker.engine = nil end
local id
if ARGV[1] == 'train' then id = next_job(worker, beside(worker.gpu, trainers()), {}) else id = first_due(ARGV[1]) end
if not id then return false end
redis.call('ZREM', 'longhaul:order:' .. ARGV[1], id)
redis.call('HSET', lj(id), 'lease', ARGV[2])
redis.call('ZADD', 'longhaul:leases', now() + ARGV[3], id)
redis.call('SET', mine, id, 'PX', 3600000)
return id
"""

# → {{id, gpu_memory_gib, gpu_name, least_bytes, native_bf16, gpus, engine, host_bytes}, …} of the jobs that wait to
# train, in order
WAITING_TO_TRAIN = """
local found = {}
for _, id in ipairs(redis.call('ZRANGE', 'longhaul:order:train', 0, -1)) do
  table.insert(found, {id, asks(id)})
end
return found
"""

# ARGV: stage, 1 if the last was taken in vain → how many tickets would find work: the jobs in its order. To train,
# where workers are idle, as many as these would start, one after the other: any other ticket would be taken in vain.
USEFUL_TICKETS = """
if not rebuilt() then return 0 end
local order = 'longhaul:order:' .. ARGV[1]
local all = redis.call('ZCARD', order)
if ARGV[1] ~= 'train' or all == 0 then return all end
local workers, taken, idle, useful = trainers(), {}, 0, 0
for _, worker in ipairs(workers) do
  if worker.healthy and not worker.job then
    idle = idle + 1
    worker.job = next_job(worker, beside(worker.gpu, workers), taken)
    if worker.job then
      useful = useful + 1
      taken[worker.job] = true
    end
  end
end
if idle == 0 and ARGV[2] ~= '1' then return all end
return useful
"""

# ARGV: id, token, lease (ms) → 1 held, 0 another holds it. A lease that nobody holds is taken again.
RENEW = """
local id = ARGV[1]
local holder = redis.call('HGET', lj(id), 'lease')
if holder and holder ~= ARGV[2] then return 0 end
redis.call('HSET', lj(id), 'lease', ARGV[2])
redis.call('ZADD', 'longhaul:leases', now() + ARGV[3], id)
place(id)
return 1
"""

# ARGV: id, token → 1 released, 0 was not held by this token
RELEASE = """
local done = drop_lease(ARGV[1], ARGV[2])
place(ARGV[1])
return done
"""

# ARGV: id, JSON of what is wrong, record as far as it can be read, submitted (ms), spec ('' if nobody can read it),
#       token to release ('' for none) → 1. The job is in no order and in no state until CLEAR_DAMAGE.
MARK_DAMAGED = """
local id = ARGV[1]
local job = lj(id)
if redis.call('HSETNX', job, 'record', ARGV[3]) == 1 then
  if ARGV[5] ~= '' then redis.call('HSET', job, 'spec', ARGV[5]) end
  redis.call('ZADD', 'longhaul:jobs', ARGV[4], id)
end
redis.call('HSET', job, 'damaged', ARGV[2])
redis.call('ZREM', 'longhaul:status:' .. (redis.call('HGET', job, 'status') or ''), id)
redis.call('ZADD', 'longhaul:status:damaged', redis.call('ZSCORE', 'longhaul:jobs', id) or 0, id)
if ARGV[6] ~= '' then drop_lease(id, ARGV[6]) end
place(id)
return 1
"""

# ARGV: id, 1 if all of it is to be projected again → 1: its directory can be read again
CLEAR_DAMAGE = """
local id = ARGV[1]
local job = lj(id)
redis.call('HDEL', job, 'damaged')
redis.call('ZREM', 'longhaul:status:damaged', id)
local status = redis.call('HGET', job, 'status')
if status then redis.call('ZADD', 'longhaul:status:' .. status, redis.call('ZSCORE', 'longhaul:jobs', id) or 0, id) end
if ARGV[2] == '1' then redis.call('HSET', job, 'number', 0) end
place(id)
return 1
"""

# ARGV: id → everything about it gone, the Idempotency-Key that stands for it too: the directory no longer exists
FORGET = """
local id = ARGV[1]
local h = redis.call('HMGET', lj(id), 'status', 'indexes', 'record')
local indexes = cjson.decode(h[2] or '[]')
local everywhere = {'jobs', 'leases', 'order:check', 'order:prepare', 'order:train', 'status:damaged'}
for _, index in ipairs(everywhere) do table.insert(indexes, index) end
table.insert(indexes, 'status:' .. (h[1] or ''))
for _, index in ipairs(indexes) do redis.call('ZREM', 'longhaul:' .. index, id) end
local key = h[3] and cjson.decode(h[3]).idempotency_key
for _, reserved in ipairs({'id:' .. id, type(key) == 'string' and key or nil}) do
  reserved = 'longhaul:idempotency:' .. reserved
  if redis.call('HGET', reserved, 'job') == id then redis.call('DEL', reserved) end
end
redis.call('DEL', lj(id), lj(id) .. ':events', lj(id) .. ':latest')
return 1
"""


def job_key(job: str) -> str:
    """Key of a job's hash: `lj` of the scripts."""
    return f"longhaul:job:{job}"
