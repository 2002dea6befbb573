"""Leader leases with fencing tokens: who holds one may act, and its token proves it inside a script."""

from __future__ import annotations

from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_common.scripts import ACQUIRE, RELEASE_LEASE


class Lease:
    """A lease `name` for `holder`. The token changes with every change of hands and never comes back."""

    def __init__(self, redis: Redis, keys: Keys, name: str, holder: str, ttl_s: float) -> None:
        self.key = keys.lease(name)
        self._fence = keys.fence(name)
        self.ttl_s, self._holder = ttl_s, holder
        self._acquire = redis.register_script(ACQUIRE)
        self._release = redis.register_script(RELEASE_LEASE)
        self.token: str | None = None

    async def hold(self) -> str | None:
        """Take or renew it; the token, or None while another holds it. Call at least three times a TTL."""
        reply = await self._acquire(keys=[self.key, self._fence], args=[self._holder, round(self.ttl_s * 1000)])
        self.token = reply.decode() if reply else None
        return self.token

    async def release(self) -> None:
        """Give it back, so that another need not wait for the TTL."""
        if self.token is not None:
            await self._release(keys=[self.key], args=[self.token])
            self.token = None
