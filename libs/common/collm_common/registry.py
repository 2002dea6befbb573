"""Who is there: replica hashes, heartbeat leases, and state changes that write hash and event together."""

from __future__ import annotations

from functools import partial

import msgspec
from redis.asyncio import Redis

from collm_common import messages, post
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.messages import Event, ReplicaChanged, StateChanged
from collm_common.scripts import TRANSITION
from collm_common.trouble import readable
from collm_common.types import ReplicaInfo, ReplicaState


class Registry:
    """Reads and writes the registry of one cell."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self.redis, self.keys = redis, keys
        self._transition = redis.register_script(TRANSITION)

    async def register(self, info: ReplicaInfo, lease_ttl_s: float) -> None:
        """Write the whole entry (state as given), whatever was there, and the first heartbeat."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.delete(self.keys.replica(info.id))
            pipe.hset(self.keys.replica(info.id), mapping=_to_hash(info))
            pipe.sadd(self.keys.replicas, info.id)
            pipe.set(self.keys.lease(info.id), info.incarnation, px=round(lease_ttl_s * 1000))
            await pipe.execute()

    async def update(self, replica: str, **changes: object) -> None:
        """Set single fields of an entry; `state` changes by `transition` alone."""
        assert "state" not in changes, "state changes go through transition()"
        await self.redis.hset(self.keys.replica(replica), mapping={k: _text(v) for k, v in changes.items()})

    async def heartbeat(self, replica: str, incarnation: str, ttl_s: float) -> None:
        """Renew the lease, and the place among the registered."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.set(self.keys.lease(replica), incarnation, px=round(ttl_s * 1000))
            pipe.sadd(self.keys.replicas, replica)
            await pipe.execute()

    async def remove(self, replica: str, reason: str, now: float) -> None:
        """Forget a replica that left for good."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.delete(self.keys.replica(replica), self.keys.lease(replica), self.keys.config(replica))
            pipe.delete(self.keys.latency(replica))
            pipe.srem(self.keys.replicas, replica)
            await pipe.execute()
        await self.announce(ReplicaChanged(replica=replica, what="left", reason=reason, time_s=now), replica)

    async def replicas(self) -> dict[str, ReplicaInfo]:
        """All entries; `alive` is false where the lease has run out."""
        return await self._read(
            sorted(name.decode(errors="replace") for name in await self.redis.smembers(self.keys.replicas))
        )

    async def replica(self, id_: str) -> ReplicaInfo | None:
        """One entry, None if it is not there or damaged."""
        return (await self._read([id_])).get(id_)

    async def _read(self, ids: list[str]) -> dict[str, ReplicaInfo]:
        async with self.redis.pipeline(transaction=False) as pipe:
            for id_ in ids:
                pipe.hgetall(self.keys.replica(id_))
                pipe.exists(self.keys.lease(id_))
            replies = await pipe.execute(raise_on_error=False)
        found = zip(ids, replies[::2], replies[1::2], strict=True)
        infos = {
            id_: readable(partial(_from_hash, alive=bool(alive)), f"registry entry of {id_}", row)
            for id_, row, alive in found
        }
        return {id_: info for id_, info in infos.items() if info is not None}

    async def transition(
        self, replica: str, before: ReplicaState, after: ReplicaState, reason: str, now: float
    ) -> bool:
        """Compare-and-set of the state with its event; False if another was first (nothing happened then)."""
        keys, args = transition_call(self.keys, replica, before, after, reason, now)
        return bool(await self._transition(keys=keys, args=args))

    async def announce(self, event: Event, id_: str) -> None:
        """Append one event."""
        await post.event(self.redis, self.keys, event, id_)


def transition_call(
    keys: Keys, replica: str, before: ReplicaState, after: ReplicaState, reason: str, now: float
) -> tuple[list[str], list[str | bytes | int]]:
    """KEYS and ARGV of the script TRANSITION, for who calls it inside a transaction of its own."""
    event = StateChanged(replica=replica, before=before, after=after, reason=reason, time_s=now)
    args = [before.value, after.value, replica, messages.encode(event), post.EVENTS_MAXLEN]
    return [keys.replica(replica), keys.events], args


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _to_hash(info: ReplicaInfo) -> dict[str, str]:
    return {k: _text(v) for k, v in msgspec.structs.asdict(info).items() if k != "alive"}


def _from_hash(row: dict[bytes, bytes], alive: bool) -> ReplicaInfo | None:
    """None for an entry that is not there. Raises MessageError."""
    if b"state" not in row:
        return None
    try:
        known = {k.decode(): v.decode() for k, v in row.items()}
        fields = {name: known[name] for name in ReplicaInfo.__struct_fields__ if name in known}
        return msgspec.convert({**fields, "alive": alive}, ReplicaInfo, strict=False)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MessageError(f"registry entry: {error}") from error
