"""Lua of the queues of requests; `jobs.redis.requests` describes their keys."""

from __future__ import annotations

HELPERS = """
local function request(id) return 'longhaul:request:' .. id end
local function clients(kind) return 'longhaul:requests:' .. kind .. ':clients' end
local function waiting(kind, client) return 'longhaul:requests:' .. kind .. ':of:' .. client end
local function at_work(kind) return 'longhaul:requests:' .. kind .. ':at_work' end
local function ring(kind)
  local bell = 'longhaul:requests:' .. kind .. ':bell'
  redis.call('RPUSH', bell, 1)
  redis.call('LTRIM', bell, -16, -1)
end
"""

# ARGV: id, kind, job, payload, client, ms that it stays without a word of its asker, most waiting, most of one client,
# most bytes → {1 if it waits, 0 if the queue is full; requests that waited before; of these, the client's; their bytes}
SUBMIT = """
local kind, client = ARGV[2], ARGV[5]
local all, own, bytes = 0, 0, 0
for _, each in ipairs(redis.call('LRANGE', clients(kind), 0, -1)) do
  for _, id in ipairs(redis.call('LRANGE', waiting(kind, each), 0, -1)) do
    if redis.call('EXISTS', request(id)) == 0 then redis.call('LREM', waiting(kind, each), 0, id)
    elseif id == ARGV[1] then return {1, all, own, bytes}  -- sent twice
    else
      all = all + 1
      bytes = bytes + redis.call('HSTRLEN', request(id), 'payload')
      if each == client then own = own + 1 end
    end
  end
  if redis.call('EXISTS', waiting(kind, each)) == 0 then redis.call('LREM', clients(kind), 0, each) end
end
if all >= tonumber(ARGV[7]) or own >= tonumber(ARGV[8]) or bytes + #ARGV[4] > tonumber(ARGV[9]) then
  return {0, all, own, bytes}
end
redis.call('HSET', request(ARGV[1]), 'kind', kind, 'job', ARGV[3], 'payload', ARGV[4], 'client', client)
redis.call('PEXPIRE', request(ARGV[1]), ARGV[6])
if own == 0 then redis.call('RPUSH', clients(kind), client) end
redis.call('RPUSH', waiting(kind, client), ARGV[1])
ring(kind)
return {1, all, own, bytes}
"""

# ARGV: kind, token of this call, ms that it is held
# → {id, job, payload, progress} of the next client's first, or nothing
TAKE = """
local kind, mine = ARGV[1], 'longhaul:requests:' .. ARGV[1] .. ':taken:' .. ARGV[2]
local id = redis.call('GET', mine)  -- sent twice: the first one did it
while not id do
  local client = redis.call('LPOP', clients(kind))
  if not client then return {} end
  id = redis.call('LPOP', waiting(kind, client))
  if redis.call('EXISTS', waiting(kind, client)) == 1 then redis.call('RPUSH', clients(kind), client) end
  if id and redis.call('EXISTS', request(id)) == 0 then id = false end
end
redis.call('SET', mine, id, 'PX', 60000)
redis.call('HSET', request(id), 'taken', 1)
redis.call('SET', request(id) .. ':held', 1, 'PX', ARGV[3])
redis.call('SADD', at_work(kind), id)
local h = redis.call('HMGET', request(id), 'job', 'payload', 'progress')
return {id, h[1] or '', h[2] or '', h[3] or '{}'}
"""

# ARGV: id, ms that it stays without another word of its asker ('': as before)
# → {state, requests at work or waiting before it}
KEEP = """
local h = redis.call('HMGET', request(ARGV[1]), 'kind', 'client', 'taken', 'ended')
if not h[1] then return {'gone', 0} end
if ARGV[2] ~= '' then redis.call('PEXPIRE', request(ARGV[1]), ARGV[2]) end
if h[4] then return {'ended', 0} end
if h[3] then return {redis.call('EXISTS', request(ARGV[1]) .. ':held') == 1 and 'taken' or 'lost', 0} end
local before = 0
for _, id in ipairs(redis.call('SMEMBERS', at_work(h[1]))) do
  if redis.call('EXISTS', request(id) .. ':held') == 1 then before = before + 1
  else redis.call('SREM', at_work(h[1]), id) end
end
for _, client in ipairs(redis.call('LRANGE', clients(h[1]), 0, -1)) do
  for place, id in ipairs(redis.call('LRANGE', waiting(h[1], client), 0, -1)) do
    if id == ARGV[1] then return {'waiting', before} end
    before = before + 1
  end
end
return {'gone', 0}
"""

# ARGV: id, number of the part from 1 on, its type, its JSON, ms that it is held, ms that answers stay, 1 if it is last
# → 1: somebody waits; 0: nobody does. The number makes a second call harmless.
ANSWER = """
if redis.call('EXISTS', request(ARGV[1])) == 0 then return 0 end
local stream = request(ARGV[1]) .. ':answer'
redis.pcall('XADD', stream, ARGV[2] .. '-0', 'type', ARGV[3], 'data', ARGV[4])
redis.call('PEXPIRE', stream, ARGV[6])
redis.call('SET', request(ARGV[1]) .. ':held', 1, 'PX', ARGV[5])
if ARGV[7] == '1' then
  redis.call('HSET', request(ARGV[1]), 'ended', 1)
  redis.call('PEXPIRE', request(ARGV[1]), ARGV[6])
  redis.call('DEL', request(ARGV[1]) .. ':held')
end
return 1
"""

# ARGV: id, progress, which is another each time → 1: it waits again, behind all other clients; 0: no other client waits
PASS_TURN = """
local h = redis.call('HMGET', request(ARGV[1]), 'kind', 'client', 'progress')
local kind, client = h[1], h[2]
if not kind then return 0 end
if h[3] == ARGV[2] then return 1 end  -- sent twice
local others = false
for _, each in ipairs(redis.call('LRANGE', clients(kind), 0, -1)) do
  for _, id in ipairs(each == client and {} or redis.call('LRANGE', waiting(kind, each), 0, -1)) do
    others = others or redis.call('EXISTS', request(id)) == 1
  end
end
if not others then return 0 end
redis.call('HSET', request(ARGV[1]), 'progress', ARGV[2])
redis.call('HDEL', request(ARGV[1]), 'taken')
redis.call('DEL', request(ARGV[1]) .. ':held')
redis.call('LPUSH', waiting(kind, client), ARGV[1])
redis.call('LREM', clients(kind), 0, client)
redis.call('RPUSH', clients(kind), client)
ring(kind)
return 1
"""

# ARGV: id → 1: it waited, and is forgotten, or its worker ends it at its next HOLD; 0: it does neither wait nor run
CANCEL = """
local h = redis.call('HMGET', request(ARGV[1]), 'kind', 'taken', 'ended')
if not h[1] or h[3] then return 0 end
if not h[2] then redis.call('DEL', request(ARGV[1]), request(ARGV[1]) .. ':answer')
elseif redis.call('EXISTS', request(ARGV[1]) .. ':held') == 1 then redis.call('HSET', request(ARGV[1]), 'cancelled', 1)
else return 0 end
return 1
"""

# ARGV: id, ms → 1: somebody waits; 0: nobody does
HOLD = """
if redis.call('HEXISTS', request(ARGV[1]), 'cancelled') == 1 then
  redis.call('DEL', request(ARGV[1]), request(ARGV[1]) .. ':held', request(ARGV[1]) .. ':answer')
end
if redis.call('EXISTS', request(ARGV[1])) == 0 then return 0 end
redis.call('SET', request(ARGV[1]) .. ':held', 1, 'PX', ARGV[2])
return 1
"""
