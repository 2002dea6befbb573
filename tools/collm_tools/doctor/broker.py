"""The broker and the cell on it: what it is, how it keeps what it is given, who lives on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo
from collm_tools.doctor.finding import Finding, note, ok, wrong

OLDEST = (6, 2)
PINGS = 20
SLOW_S, SKEWED_S, FULL = 0.02, 0.5, 0.8


async def look(redis: Redis, keys: Keys) -> list[Finding]:
    """Raises redis-py's errors when the broker is away, or does not let this user look."""
    info = await redis.info()
    took = []
    for _ in range(PINGS):
        start_s = time.perf_counter()
        await redis.ping()
        took.append(time.perf_counter() - start_s)
    asked_s = time.time()
    seconds, microseconds = await redis.time()
    skew_s = seconds + microseconds / 1e6 - (asked_s + time.time()) / 2
    replicas = await Registry(redis, keys).replicas()
    names = ["launcher", "coordinator", *(f"dispatch:{model}" for model in {info.model for info in replicas.values()})]
    leases = {name: bool(await redis.exists(keys.lease(name))) for name in names}
    return [*judge(info), distance(statistics.median(took)), clock(skew_s), *cell(replicas, leases)]


def judge(info: Mapping[str, Any]) -> list[Finding]:
    """What INFO tells of it."""
    version = str(info.get("redis_version", "0"))
    found = [ok("broker", f"{info.get('server_name', 'redis')} {info.get('valkey_version', version)}")]
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        found = [wrong("broker", f"version {version}", "Redis 6.2 or later, or Valkey")]
    if info.get("role", "master") != "master":
        named = "name the primary, or Sentinels: redis+sentinel://"
        found.append(wrong("role", "a copy, which takes no writes", named))
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        keep = "CONFIG SET maxmemory-policy noeviction: it would drop requests"
        found.append(wrong("eviction", f"maxmemory-policy {policy}", keep))
    found += [*_disk(info), *_memory(info)]
    return found


def _disk(info: Mapping[str, Any]) -> list[Finding]:
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        return [wrong("disk", "its last write to disk failed", "free its disk; until then it may refuse writes")]
    if not info.get("aof_enabled"):
        return [note("disk", "no append-only file", "a restart forgets jobs and adapters: appendonly yes")]
    return [ok("disk", "an append-only file is written")]


def _memory(info: Mapping[str, Any]) -> list[Finding]:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    said = f"{used / 2**20:,.0f} MiB used" + (f" of {limit / 2**20:,.0f}" if limit else ", no limit")
    if limit and used > FULL * limit:
        return [note("memory of the broker", said, "once it is full, new requests are answered 503: raise maxmemory")]
    return [ok("memory of the broker", said)]


def distance(median_s: float) -> Finding:
    """A request passes the broker some six times."""
    said = f"a ping takes {median_s * 1000:.1f} ms"
    near = median_s < SLOW_S
    return ok("distance", said) if near else note("distance", said, "every token takes this way: run it nearer")


def clock(skew_s: float) -> Finding:
    """Deadlines are stamped by wall clocks."""
    said = f"{abs(skew_s):.2f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    near = abs(skew_s) < SKEWED_S
    return ok("clock", said) if near else note("clock", said, "set clocks by NTP: deadlines are off by it")


def cell(replicas: Mapping[str, ReplicaInfo], leases: Mapping[str, bool]) -> list[Finding]:
    """Who is there, and which service nobody does."""
    if not replicas:
        return [note("cell", "no replica has registered", "start replicas and a dispatcher")]
    ready = [id_ for id_, info in replicas.items() if info.alive and info.ready]
    missing = sorted(set(replicas) - set(ready))
    said = f"{len(ready)} of {len(replicas)} replicas can answer"
    found = [ok("cell", said)]
    if missing:
        less = note if ready else wrong
        found = [less("cell", f"{said}; not {', '.join(missing)}", "their logs, and collm status, say why")]
    for name in sorted(name for name, held in leases.items() if not held):
        service, _, model = name.partition(":")
        if model:
            idle = f"nobody leads the streams of {model}"
            found.append(wrong("dispatcher", idle, "start a dispatcher: requests wait"))
        else:
            found.append(note(service, "nobody holds its lease", f"start a {service}: until then nothing is trained"))
    return found
