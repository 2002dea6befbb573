"""The original streams of a cell and the set of their names: appended to within bounds, removed when nobody uses them.

Both happen in one script each, so a stream with an entry in it is always in the set, where the dispatch loop finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common import messages
from collm_common.errors import Damaged, FencedError, InvalidRequest, Overloaded
from collm_common.keys import Keys
from collm_common.messages import Request
from collm_common.trouble import TROUBLES

APPEND = """
-- KEYS: original stream, streams. ARGV: name in the set, most entries, most streams (0 is no bound), kind, then id and
-- data of each entry. Returns what is full: {'entries', how many} or {'streams', how many}; {'damaged', key} for one of
-- a wrong type; else {'ids', ...}
for key, kind in pairs({[KEYS[1]] = 'stream', [KEYS[2]] = 'set'}) do
  local found = redis.call('TYPE', key)['ok']
  if found ~= 'none' and found ~= kind then return {'damaged', key} end
end
local function over(bound, count) return tonumber(bound) > 0 and count > tonumber(bound) end
local entries = redis.call('XLEN', KEYS[1])
if over(ARGV[2], entries + (#ARGV - 4) / 2) then return {'entries', entries} end
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then
  local streams = redis.call('SCARD', KEYS[2])
  if over(ARGV[3], streams + 1) then return {'streams', streams} end
  redis.call('SADD', KEYS[2], ARGV[1])
end
local reply = {'ids'}
for i = 5, #ARGV, 2 do
  reply[#reply + 1] = redis.call('XADD', KEYS[1], '*', 'kind', ARGV[4], 'id', ARGV[i], 'data', ARGV[i + 1])
end
return reply
"""

PRUNE = """
-- KEYS: leader lease, original stream, streams. ARGV: token, name in the set.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
if redis.call('TYPE', KEYS[2])['ok'] == 'stream' and redis.call('XLEN', KEYS[2]) > 0 then return 0 end
redis.call('DEL', KEYS[2])
redis.call('SREM', KEYS[3], ARGV[2])
return 1
"""


MISSING = """
-- KEYS: subflows, then the original stream of each request, then the replies of their ingress. ARGV: how many
-- subflows, then entry id and id of each request. Returns the id of the last reply, then the numbers, from 0, of the
-- requests that are in no stream.
local subflows, missing, moved = tonumber(ARGV[1]), {}, nil
local function read_subflows()
  moved = {}
  for i = 1, subflows do
    local rows = redis.pcall('XRANGE', KEYS[i], '-', '+')
    for _, row in ipairs(rows.err and {} or rows) do
      for field = 1, #row[2], 2 do
        if row[2][field] == 'id' then moved[row[2][field + 1]] = true end
      end
    end
  end
end
for i = subflows + 1, #KEYS - 1 do
  local n = i - subflows
  local rows = redis.pcall('XRANGE', KEYS[i], ARGV[2 * n], ARGV[2 * n])
  if rows.err or #rows == 0 then
    if not moved then read_subflows() end
    if not moved[ARGV[2 * n + 1]] then missing[#missing + 1] = n - 1 end
  end
end
local last = redis.call('XREVRANGE', KEYS[#KEYS], '+', '-', 'COUNT', 1)
return {#last > 0 and last[1][1] or '0-0', unpack(missing)}
"""


class Bounds(Struct, frozen=True):
    """At most `max_queued` requests wait in one stream; clients may make streams of their own up to `max_streams`."""

    max_queued: int
    max_streams: int
    retry_after_s: float


class Originals:
    """Knows no bounds: its callers say which ones hold."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._append = redis.register_script(APPEND)
        self._prune = redis.register_script(PRUNE)
        self._missing = redis.register_script(MISSING)

    async def announce(self, model: str, slo: str) -> None:
        """Make a stream known before its first request."""
        await self._redis.sadd(self._keys.streams, stream_name(model, slo))

    async def append(
        self, requests: Sequence[Request], bounds: Bounds | None = None, *, configured: bool = True
    ) -> list[str]:
        """All of one stream, or none; their entries' ids. `configured`: the stream may always be made.

        Raises Overloaded when the stream is full, InvalidRequest when clients use too many objectives of their own,
        Damaged when a key is of another type.
        """
        model, slo = requests[0].model, requests[0].slo.name
        keys = [self._keys.requests(model, slo), self._keys.streams]
        max_queued, max_streams = (bounds.max_queued, bounds.max_streams) if bounds else (0, 0)
        most = [max_queued, 0 if configured else max_streams]
        entries = [part for request in requests for part in (request.id, messages.encode(request))]
        kind = messages.kind(requests[0])
        what, *values = await self._append(keys=keys, args=[stream_name(model, slo), *most, kind, *entries])
        if what == b"damaged":
            key = bytes(values[0]).decode()
            TROUBLES.skip(key, ResponseError("WRONGTYPE: requests are refused"))
            raise Damaged(key)
        if what == b"entries":
            raise Overloaded(
                f"{values[0]} requests of this model and objective wait, the limit is {max_queued}",
                retry_after_s=bounds.retry_after_s if bounds else None,
            )
        if what == b"streams":
            raise InvalidRequest(
                f"{values[0]} objectives are in use, the limit is {max_streams}; use one of the classes", param="slo"
            )
        return [bytes(value).decode() for value in values]

    async def missing(
        self, places: Sequence[tuple[str, str, str]], replicas: Sequence[str], ingress: str
    ) -> tuple[list[int], str]:
        """Which of the requests (stream, entry id, id) are neither there nor in a replica's subflow.

        Beside it, the id of the last reply to their ingress: up to there it must have read to know that one is lost.
        """
        keys = [*map(self._keys.subflow, replicas), *(stream for stream, _, _ in places), self._keys.replies(ingress)]
        args = [part for _, entry_id, id_ in places for part in (entry_id, id_)]
        last, *numbers = await self._missing(keys=keys, args=[len(replicas), *args])
        return [int(number) for number in numbers], bytes(last).decode()

    async def prune(self, lease_key: str, token: str, model: str, slo: str) -> bool:
        """Remove a stream without entries; False if it has some. Raises FencedError unless `token` is the lease's."""
        keys = [lease_key, self._keys.requests(model, slo), self._keys.streams]
        pruned = await self._prune(keys=keys, args=[token, stream_name(model, slo)])
        if pruned is None:
            raise FencedError(f"{token} does not lead any more")
        return bool(pruned)


def stream_name(model: str, slo: str) -> str:
    """As it stands in the set `streams`."""
    return f"{model}|{slo}"
