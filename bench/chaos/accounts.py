"""What must hold when the faults are over: requests, states, keys and memory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from redis.asyncio import Redis

from bench.chaos.clients import Record
from collm_common import messages, streams
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.messages import AdapterPublished, JobChanged, StateChanged
from collm_common.types import ReplicaState

LEGAL = {
    (ReplicaState.SERVING, ReplicaState.IDLE),
    (ReplicaState.IDLE, ReplicaState.SERVING),
    (ReplicaState.IDLE, ReplicaState.COMBINED),
    (ReplicaState.COMBINED, ReplicaState.SERVING),
}
LASTING = r"replicas|streams|room|adapters|jobs|events|telemetry|fence:.+|replica:.+|latency:.+|config:.+|adapter:.+"
WORK = r"requests:.+|subflow:.+"
PASSING = r"lease:.+|replies:.+"
CONTROL = r"control:.+"
JOB = r"job:[^:]+(:r\d+:.+)?"
BOUNDED = r"telemetry|events|room|replies:.+|control:.+|adapter:.+:v\d+"
MOST_VERSIONS = 6


def of_requests(records: Sequence[Record]) -> tuple[Counter[str], list[str]]:
    """(how many ended how, what went wrong)."""
    ends: Counter[str] = Counter()
    for record in records:
        ends[_end(record)] += 1
        ends["turned away and asked again"] += record.turned_away
        ends["cut off by the death of their HTTP service and asked again"] += bool(record.cut)
    return ends, [f"{record.kind} by {record.ingress}: {record.fault}" for record in records if record.fault]


def _end(record: Record) -> str:
    if record.fault:
        return record.fault.partition(":")[0]
    return "completed" if record.completed else "left by the client"


async def of_events(redis: Redis, keys: Keys) -> tuple[Counter[str], list[str]]:
    """(how often what happened, every transition that the machine of three states does not have)."""
    seen: Counter[str] = Counter()
    problems = []
    for entry in streams.parse(keys.events, await redis.xrange(keys.events)):
        try:
            message = messages.decode(entry.data)
        except MessageError as error:
            problems.append(f"unreadable event {entry.entry_id}: {error}")
            continue
        match message:
            case StateChanged(before=before, after=after):
                seen["changes of state"] += 1
                if (before, after) not in LEGAL:
                    problems.append(f"{message.replica}: {before} -> {after}: {message.reason}")
            case JobChanged(status=status):
                seen[f"jobs {status}"] += 1
            case AdapterPublished():
                seen["adapter versions published"] += 1
    return seen, problems


async def of_keys(redis: Redis, keys: Keys) -> list[str]:
    """Keys of an unknown kind, work left over, and what should end but has no end. Called when nothing is running."""
    jobs = {job.decode() for job in await redis.smembers(keys.jobs)}
    problems = []
    versions = 0
    async for raw in redis.scan_iter(count=1000):
        key = raw.decode()
        name = key.removeprefix(keys.prefix)
        versions += bool(re.fullmatch(r"adapter:.+:v\d+", name))
        if not key.startswith(keys.prefix) or not re.fullmatch("|".join((LASTING, WORK, PASSING, CONTROL, JOB)), name):
            problems.append(f"unknown key {key}")
        elif re.fullmatch(WORK, name) and (count := await redis.xlen(key)):
            problems.append(f"{count} entries left in {key}")
        elif re.fullmatch(PASSING, name) and await redis.pttl(key) == -1:
            problems.append(f"{key} would stay for ever")
        elif (update := re.fullmatch(r"job:([^:]+):r\d+:.+", name)) and update[1] not in jobs:
            problems.append(f"{key} is left of a job that has ended")
    if versions > MOST_VERSIONS:
        problems.append(f"{versions} adapter versions are kept, of one adapter")
    return problems


async def kept_bytes(redis: Redis, keys: Keys) -> int:
    """What the broker holds beside what ends by itself, and what is kept at a bounded length or number."""
    total = 0
    async for key in redis.scan_iter(count=1000):
        if not re.fullmatch(BOUNDED, key.decode().removeprefix(keys.prefix)) and await redis.pttl(key) < 0:
            total += await redis.memory_usage(key, samples=0) or 0
    return total


def of_memory(first: int, last: int, limit: float) -> list[str]:
    """Of `kept_bytes` early in the run and at its end."""
    return [f"what the broker keeps grew from {first} to {last} bytes"] if last > first * (1 + limit) else []
