"""Keys of clients: who made them may show them once; Redis has their digests and what they allow."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from redis.asyncio import Redis

from collm_common.errors import SettingsError
from collm_common.keys import Keys
from collm_common.types import AtLeastOne, Name

START = "sk-collm-"
SHOWN = len(START) + 6
AUDITED = 10_000
"""Entries of the audit log, about."""
TenantName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)")]


class ApiKey(Struct, frozen=True, kw_only=True):
    """What a key allows; None is no limit. `prefix` is how it is shown.

    `train`: files, jobs and feedback. `operator`: what belongs to the cell, not to a tenant. Without `slo_classes`
    every objective is allowed, with them only these classes.
    """

    prefix: str
    tenant: TenantName
    created_s: float
    train: bool = False
    operator: bool = False
    requests_per_minute: AtLeastOne | None = None
    tokens_per_minute: AtLeastOne | None = None
    streams: AtLeastOne | None = None
    slo_classes: tuple[Name, ...] = ()


def digest(secret: str) -> str:
    """Under which a key is kept: it has 256 random bits, so a plain hash cannot be guessed."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class ApiKeys:
    """All keys of a cell."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def create(self, tenant: str, **allowed: object) -> tuple[str, ApiKey]:
        """The secret, which nobody can be told again, and what is kept. Raises SettingsError."""
        secret = START + secrets.token_urlsafe(32)
        about = {"prefix": secret[:SHOWN], "tenant": tenant, "created_s": time.time(), **allowed}
        try:
            made = msgspec.convert(about, ApiKey)
        except msgspec.ValidationError as error:
            raise SettingsError(f"the key cannot be made: {error}") from error
        await self._redis.hset(self._keys.api_keys, digest(secret), msgspec.json.encode(made))
        return secret, made

    async def find(self, secret: str) -> ApiKey | None:
        """None for one that was never made, was revoked, or whose entry cannot be read."""
        row = await self._redis.hget(self._keys.api_keys, digest(secret))
        return None if row is None else _read(row)

    async def listing(self) -> list[ApiKey]:
        """The oldest first."""
        rows = (await self._redis.hgetall(self._keys.api_keys)).values()
        return sorted((key for row in rows if (key := _read(row))), key=lambda key: key.created_s)

    async def revoke(self, prefix: str) -> ApiKey:
        """No request passes with it any more. Raises SettingsError unless exactly one key begins so."""
        rows = await self._redis.hgetall(self._keys.api_keys)
        found = [(name, key) for name, row in rows.items() if (key := _read(row)) and key.prefix == prefix]
        if len(found) != 1:
            raise SettingsError(f"{len(found)} keys are shown as {prefix[:SHOWN]!r}, must be one")
        ((name, key),) = found
        await self._redis.hdel(self._keys.api_keys, name)
        return key

    async def audit(self, who: str, tenant: str, what: str, outcome: str) -> None:
        """One line of the log, with the broker's time as its id; never a body or a secret."""
        row = {"who": who, "tenant": tenant, "what": what[:200], "outcome": outcome}
        await self._redis.xadd(
            self._keys.audit, {name: value.encode(errors="replace") for name, value in row.items()}, maxlen=AUDITED
        )


def _read(row: bytes) -> ApiKey | None:
    try:
        return msgspec.json.decode(row, type=ApiKey)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
