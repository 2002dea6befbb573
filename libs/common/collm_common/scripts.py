"""Lua scripts: what must happen together or not at all. KEYS of one call share the hash tag of their cell."""

from __future__ import annotations

TRANSITION = """
-- KEYS: replica hash, events. ARGV: before, after, event id, event bytes, maxlen
if redis.call('HGET', KEYS[1], 'state') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'state', ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'kind', 'state_changed', 'id', ARGV[3], 'data', ARGV[4])
return 1
"""

ACQUIRE = """
-- KEYS: lease, fence counter. ARGV: holder, ttl ms. The token is `holder#n.time`: n grows with every change of hands,
-- the time tells it from the n-th one of a broker that has lost its memory since
local held = redis.call('GET', KEYS[1])
-- Who holds a lease gives it an end; one without was written by nobody who leads.
if held and redis.call('PTTL', KEYS[1]) > 0 then
  if string.match(held, '^(.*)#[^#]*$') ~= ARGV[1] then return false end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return held
end
local time = redis.call('TIME')
local token = ARGV[1] .. '#' .. redis.call('INCR', KEYS[2]) .. '.' .. time[1] .. '.' .. time[2]
redis.call('SET', KEYS[1], token, 'PX', ARGV[2])
return token
"""

RELEASE_LEASE = """
-- KEYS: lease. ARGV: token
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""

GIVE_UP = """
-- One entry of a subflow is lost: tell its ingress once and remove it.
-- KEYS: subflow, replies of the ingress. ARGV: group, entry id, request id, reply bytes, maxlen, ttl ms
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
if redis.call('XDEL', KEYS[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'kind', 'replies', 'id', ARGV[3], 'data', ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
return 1
"""
