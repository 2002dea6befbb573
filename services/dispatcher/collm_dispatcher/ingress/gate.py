"""Who may pass: the key of a request, what it allows, how much of that is used up, and the log of what it changed."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from msgspec import Struct
from redis.asyncio import Redis

from collm_common.api_keys import ApiKey, ApiKeys, digest
from collm_common.broker import AWAY
from collm_common.errors import Overloaded, RequestError
from collm_common.keys import Keys
from collm_common.types import Slo
from collm_dispatcher.ingress import objectives

log = logging.getLogger(__name__)
OPEN = frozenset({"/health", "/ready", "/openapi.json"})
FOR_OPERATORS = ("/", "/live/", "/metrics", "/v1/replicas/")
FOR_TRAINING = ("/v1/files", "/v1/fine_tuning/", "/v1/feedback")
ANSWERS = frozenset({"/v1/chat/completions", "/v1/completions"})
HELD, DIGEST = web.RequestKey("held", ApiKey), web.RequestKey("digest", str)

ENTER = """
-- KEYS: usage, open streams. ARGV: most requests, most tokens, most streams (0 is no limit), member, how many seconds
-- it may last. Returns {'', 0}, or what is used up and after how many seconds there is more.
local now = tonumber(redis.call('TIME')[1])
local minute, left = math.floor(now / 60), 60 - now % 60
if redis.call('HGET', KEYS[1], 'minute') ~= tostring(minute) then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], 'minute', minute)
end
redis.call('EXPIRE', KEYS[1], 120)
local function full(limit, used) return tonumber(limit) > 0 and tonumber(used or 0) >= tonumber(limit) end
if full(ARGV[1], redis.call('HGET', KEYS[1], 'requests') or 0) then return {'requests', left} end
if full(ARGV[2], redis.call('HGET', KEYS[1], 'tokens') or 0) then return {'tokens', left} end
if ARGV[4] ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if full(ARGV[3], redis.call('ZCARD', KEYS[2])) then return {'streams', 1} end
  redis.call('ZADD', KEYS[2], now + tonumber(ARGV[5]), ARGV[4])
  redis.call('EXPIRE', KEYS[2], tonumber(ARGV[5]) + 1)
end
redis.call('HINCRBY', KEYS[1], 'requests', 1)
return {'', 0}
"""


class NoKey(RequestError):
    """A key is missing, or is none."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class NotAllowed(RequestError):
    """Not with this key."""

    status = 403
    type = "permission_error"
    code = "insufficient_permissions"


class Caller(Struct, frozen=True):
    """Who asks for an answer; of the adapters some are `hidden`, of the classes only those `allowed`, if any."""

    tenant: str
    hidden: frozenset[str]
    allowed: tuple[str, ...]

    def check(self, slo: Slo) -> None:
        """Raises NotAllowed."""
        if self.allowed and slo.name not in self.allowed:
            raise NotAllowed(f"slo: this key may use the classes {', '.join(self.allowed)}", param="slo")


def key_of(request: web.Request) -> ApiKey | None:
    """None where no keys are required."""
    return request.get(HELD)


def scope(request: web.Request) -> str:
    """Whose things a request sees: "" in an open cell, where all see all."""
    held = key_of(request)
    return held.tenant if held is not None else ""


def tenant(request: web.Request) -> str:
    """Whose it is: the key says, and only without keys a header. Raises InvalidRequest."""
    return scope(request) or objectives.tenant(request.headers)


class Gate:
    """Lets everything pass unless keys are `required`. An answer may last for `last_s` seconds."""

    def __init__(self, redis: Redis, keys: Keys, required: bool, last_s: float) -> None:
        self._redis, self._keys, self._required, self._last_s = redis, keys, required, last_s
        self._known, self._enter = ApiKeys(redis, keys), redis.register_script(ENTER)

    @asynccontextmanager
    async def passing(self, request: web.Request) -> AsyncIterator[None]:
        """Raises NoKey, NotAllowed or Overloaded. Afterwards the request has its key, and what it changes is logged."""
        if not self._required or _route(request) in OPEN:
            yield
            return
        held = await self._hold(request)
        outcome = "200"
        try:
            self._check(request, held)
            async with self._counted(request, held):
                yield
        except RequestError as error:
            outcome = f"{error.status} {error.code}"
            raise
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            if request.method in ("POST", "DELETE") and _route(request) not in ANSWERS:
                await self._log(held, f"{request.method} {request.path}", outcome)

    async def spend(self, request: web.Request, tokens: int) -> None:
        """Count what an answer took against its key's minute."""
        held = key_of(request)
        if held is None or held.tokens_per_minute is None:
            return
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hincrby(self._keys.usage(request[DIGEST]), "tokens", tokens)
                pipe.expire(self._keys.usage(request[DIGEST]), 120)
                await pipe.execute()
        except AWAY as error:
            log.warning("%d tokens of key %s are not counted, the broker is away: %s", tokens, held.prefix, error)

    async def claim(self, request: web.Request, adapter: str) -> None:
        """An adapter's name belongs to the tenant that uses it first. Raises NotAllowed, also for the cell's own."""
        who = scope(request)
        if not who or await self.owns(request, adapter):
            return
        known = await self._redis.sismember(self._keys.adapters, adapter)
        if known or not await self._redis.hsetnx(self._keys.owners, adapter, who):
            raise NotAllowed(f"the name {adapter[:80]!r} is taken", param="model")

    async def owns(self, request: web.Request, adapter: str) -> bool:
        """Whether it may be changed: it is the tenant's own, or nobody asks."""
        who = scope(request)
        return not who or bool(await self._redis.hget(self._keys.owners, adapter) == who.encode())

    async def caller(self, request: web.Request) -> Caller:
        """Raises InvalidRequest for a tenant's name that is none."""
        held = key_of(request)
        return Caller(tenant(request), await self.hidden(request), held.slo_classes if held is not None else ())

    async def hidden(self, request: web.Request) -> frozenset[str]:
        """The adapters of other tenants; one that has no owner is everybody's."""
        if not (who := scope(request)):
            return frozenset()
        owners = await self._redis.hgetall(self._keys.owners)
        return frozenset(name.decode(errors="replace") for name, owner in owners.items() if owner != who.encode())

    async def _hold(self, request: web.Request) -> ApiKey:
        kind, _, secret = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            raise NoKey("an API key is required: Authorization: Bearer …")
        held = await self._known.find(secret.strip())
        if held is None:
            raise NoKey("the API key is unknown or was revoked")
        request[HELD], request[DIGEST] = held, digest(secret.strip())
        return held

    def _check(self, request: web.Request, held: ApiKey) -> None:
        path = _route(request)
        if not held.operator and any(
            path == each or (len(each) > 1 and path.startswith(each)) for each in FOR_OPERATORS
        ):
            raise NotAllowed("this belongs to the cell: it needs an operator's key")
        if not held.train and path.startswith(FOR_TRAINING):
            raise NotAllowed("this key may not train")

    @asynccontextmanager
    async def _counted(self, request: web.Request, held: ApiKey) -> AsyncIterator[None]:
        member = uuid.uuid4().hex if _route(request) in ANSWERS and held.streams else ""
        names = [self._keys.usage(request[DIGEST]), self._keys.streaming(request[DIGEST])]
        limits = [held.requests_per_minute or 0, held.tokens_per_minute or 0, held.streams or 0]
        what, after_s = await self._enter(keys=names, args=[*limits, member, round(self._last_s)])
        if what:
            limit = dict(zip((b"requests", b"tokens", b"streams"), limits, strict=True))[what]
            unit = "at a time" if what == b"streams" else "a minute"
            raise Overloaded(
                f"{what.decode()}: the limit of this key is {limit} {unit}",
                code="rate_limit_exceeded",
                retry_after_s=float(after_s),
            )
        try:
            yield
        finally:
            if member:
                await self._leave(names[1], member)

    async def _leave(self, name: str, member: str) -> None:
        try:
            await self._redis.zrem(name, member)
        except AWAY as error:
            log.warning("a stream stays counted for %g s, the broker is away: %s", self._last_s, error)

    async def _log(self, held: ApiKey, what: str, outcome: str) -> None:
        try:
            await self._known.audit(held.prefix, held.tenant, what, outcome)
        except AWAY as error:
            log.warning("%s of key %s is not in the audit log, the broker is away: %s", what, held.prefix, error)


def _route(request: web.Request) -> str:
    """As it was declared, however a client spells it."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else request.path
