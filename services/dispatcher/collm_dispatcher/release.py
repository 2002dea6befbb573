"""Moving requests: from an original stream into a subflow, or out with an error. Each move is one script."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from redis.asyncio import Redis

from collm_common.errors import FencedError
from collm_common.keys import Keys
from collm_common.messages import Expected, Failed
from collm_common.requeue import GROUP, GiveUp
from collm_common.types import ReplicaState
from collm_dispatcher.policy.queue import Waiting

RELEASE = """
-- KEYS: leader lease, subflow, replica hash, replica lease, then the original stream of each entry.
-- ARGV: token, most in flight, group, idle state, then each entry id and what is noted on it.
-- Returns the room that is left, then for each entry it got to: 1 moved, 0 gone (its client left).
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
local room = tonumber(ARGV[2]) - redis.call('XLEN', KEYS[2])
local seen = redis.call('HMGET', KEYS[3], 'ready', 'state')
if seen[1] ~= '1' or seen[2] == ARGV[4] or redis.call('EXISTS', KEYS[4]) == 0 then return {0} end
local moved = {0}
for i = 5, #KEYS do
  if room <= 0 then break end
  local id, note = ARGV[2 * i - 5], ARGV[2 * i - 4]
  local rows = redis.pcall('XRANGE', KEYS[i], id, id)
  redis.pcall('XACK', KEYS[i], ARGV[3], id)
  if rows.err or #rows == 0 then
    moved[#moved + 1] = 0
  else
    redis.call('XDEL', KEYS[i], id)
    local fields = rows[1][2]
    fields[#fields + 1] = 'note'
    fields[#fields + 1] = note
    redis.call('XADD', KEYS[2], '*', unpack(fields))
    room = room - 1
    moved[#moved + 1] = 1
  end
end
moved[1] = math.max(room, 0)
return moved
"""


class Mover:
    """Both moves of the dispatch loop. `token` is the leader's fencing token."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = keys
        self._release = redis.register_script(RELEASE)
        self._give_up = GiveUp(redis, keys)

    async def release(
        self, lease_key: str, token: str, replica: str, most: int, entries: Sequence[tuple[Waiting, Expected | None]]
    ) -> tuple[int, int]:
        """Move `entries` in order while the replica has room for `most` in flight; (room left, entries settled).

        Each takes along what is expected of it. A settled entry was moved or is gone.
        Raises FencedError, with nothing moved, if the token is not the lease's.
        """
        keys = [lease_key, self._keys.subflow(replica), self._keys.replica(replica), self._keys.lease(replica)]
        args: list[str | int | bytes] = [token, most, GROUP, ReplicaState.IDLE.value]
        for entry, expected in entries:
            keys.append(entry.key)
            args += [entry.entry_id, b"" if expected is None else msgspec.json.encode(expected)]
        reply = await self._release(keys=keys, args=args)
        if reply is None:
            raise FencedError(f"{token} does not lead any more")
        return int(reply[0]), len(reply) - 1

    async def refuse(self, entry: Waiting, status: int, code: str, message: str) -> bool:
        """Answer an entry with an error and remove it; False if it is not there any more."""
        failed = Failed(entry.request_id, entry.attempt, status, code, message)
        return await self._give_up(entry.key, entry.entry_id, entry.ingress, failed)
