"""The broker's users, as compose and the chart make them: each service has the rights that it would have there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from redis.asyncio import Redis

from collm_common.broker import connection

FOLDER = Path(__file__).resolve().parents[2] / "deploy/redis"
SERVICES = ("dispatcher", "replica", "launcher", "coordinator")


@cache
def lines() -> tuple[str, ...]:
    """What start.sh makes of users.acl, with each name as its password; without the default user."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(FOLDER / "users.acl", folder)
        script = (FOLDER / "start.sh").read_text().replace("/tmp/users.acl", f"{folder}/filled")
        script = script.replace("/etc/collm", name).replace("exec redis-server", "exec true")
        passwords = {f"{user.upper()}_PASSWORD": user for user in (*SERVICES, "operator")}
        subprocess.run(["sh", "-c", script], env={**os.environ, **passwords}, check=True, timeout=20)
        found = (folder / "filled").read_text().splitlines()
    return tuple(line for line in found if not line.startswith("user default "))


@asynccontextmanager
async def as_user(redis: Redis, user: str) -> AsyncIterator[Redis]:
    """Another client of the same server, with the rights of a service."""
    port = redis.connection_pool.connection_kwargs["port"]
    async with connection(f"redis://{user}:{user}@127.0.0.1:{port}/0") as own:
        yield own


async def denied(redis: Redis) -> list[str]:
    """What services asked for and were not allowed, since it was asked last."""
    found = await redis.execute_command("ACL", "LOG", 100)
    await redis.execute_command("ACL", "LOG", "RESET")
    rows = [{row[n].decode(): row[n + 1] for n in range(0, len(row), 2)} for row in found]
    return [f"{row['username'].decode()}: {row['reason'].decode()} {row['object'].decode()}" for row in rows]
