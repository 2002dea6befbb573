"""Putting requests onto original streams and taking them back: each is one script."""

from __future__ import annotations

from collections.abc import Iterable

from collm_common import messages
from collm_common.errors import InvalidRequest, Overloaded
from collm_common.keys import Keys
from collm_common.messages import Cancel, Request
from collm_common.requeue import GROUP
from redis.asyncio import Redis

CONTROL_MAXLEN = 10_000

ADMIT = """
-- KEYS: set of streams, original stream. ARGV: member, group, most queued, most streams, kind, id, data
if redis.call('SISMEMBER', KEYS[1], ARGV[1]) == 0 and redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[4]) then
  return 'streams'
end
if redis.call('XLEN', KEYS[2]) >= tonumber(ARGV[3]) then return 'queue' end
redis.call('SADD', KEYS[1], ARGV[1])
return redis.call('XADD', KEYS[2], '*', 'kind', ARGV[5], 'id', ARGV[6], 'data', ARGV[7])
"""

READMIT = """
-- KEYS and ARGV as above, with the former attempt's entry id in place of the bounds.
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
redis.call('XDEL', KEYS[2], ARGV[3])
redis.call('SADD', KEYS[1], ARGV[1])
return redis.call('XADD', KEYS[2], '*', 'kind', ARGV[4], 'id', ARGV[5], 'data', ARGV[6])
"""

CANCEL = """
-- KEYS: original stream, then subflow and control stream of each replica.
-- ARGV: group, entry id, request id, kind, command, maxlen. Returns how many replicas had it.
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
local found = 0
for i = 2, #KEYS, 2 do
  for _, row in ipairs(redis.call('XRANGE', KEYS[i], '-', '+')) do
    local fields, id = row[2], nil
    for f = 1, #fields, 2 do
      if fields[f] == 'id' then id = fields[f + 1] end
    end
    if id == ARGV[3] then
      found = found + 1
      local pending = redis.pcall('XPENDING', KEYS[i], ARGV[1], row[1], row[1], 1)
      if pending.err or #pending == 0 then
        redis.call('XDEL', KEYS[i], row[1])
      else
        redis.call('XADD', KEYS[i + 1], 'MAXLEN', '~', ARGV[6], '*', 'kind', ARGV[4], 'id', ARGV[3], 'data', ARGV[5])
      end
    end
  end
end
return found
"""


class Admission:
    """`max_queued` bounds each original stream, `max_streams` their number, over all ingresses of the cell."""

    def __init__(self, redis: Redis, keys: Keys, max_queued: int, max_streams: int, retry_after_s: float) -> None:
        self._keys, self._max_queued, self._max_streams = keys, max_queued, max_streams
        self._retry_after_s = retry_after_s
        self._admit, self._readmit = redis.register_script(ADMIT), redis.register_script(READMIT)
        self._cancel = redis.register_script(CANCEL)

    async def admit(self, request: Request) -> str:
        """Returns the entry id. Raises Overloaded, or InvalidRequest for one objective too many."""
        bounds = [self._max_queued, self._max_streams]
        reply = (await self._admit(keys=self._streams(request), args=self._arguments(request, *bounds))).decode()
        if reply == "streams":
            raise InvalidRequest(
                f"slo: {self._max_streams} different objectives are in use, which is the limit; use one of them",
                param="slo",
            )
        if reply == "queue":
            raise Overloaded(
                f"{self._max_queued} requests of class {request.slo.name} wait, which is the limit",
                retry_after_s=self._retry_after_s,
            )
        return str(reply)

    async def readmit(self, request: Request, before: str) -> str:
        """A further attempt of what was admitted as entry `before`: no bound applies, and the old entry is gone."""
        reply = await self._readmit(keys=self._streams(request), args=self._arguments(request, before))
        return str(reply.decode())

    async def cancel(self, request: Request, entry_id: str, replicas: Iterable[str]) -> int:
        """Take it out of wherever it is; a replica that has read it is told. Returns how many replicas had it."""
        keys = [self._keys.requests(request.model, request.slo.name)]
        for replica in replicas:
            keys += [self._keys.subflow(replica), self._keys.control(replica)]
        command = Cancel(id=request.id)
        args = [GROUP, entry_id, request.id, messages.kind(command), messages.encode(command), CONTROL_MAXLEN]
        return int(await self._cancel(keys=keys, args=args))

    def _streams(self, request: Request) -> list[str]:
        return [self._keys.streams, self._keys.requests(request.model, request.slo.name)]

    @staticmethod
    def _arguments(request: Request, *own: int | str) -> list[int | str | bytes]:
        member = f"{request.model}|{request.slo.name}"
        return [member, GROUP, *own, messages.kind(request), request.id, messages.encode(request)]
