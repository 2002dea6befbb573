"""Lines of training data at the replicas that train on them: dealt out, gathered, taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import aiohttp

from collm_common.errors import InvalidRequest, Unavailable
from collm_dispatcher.cell import Cell


def place(cell: Cell, replica: str) -> str:
    """The data endpoint of a replica. Raises Unavailable."""
    member = cell.members.get(replica)
    if member is None or not member.info.alive or not member.info.data_url:
        raise Unavailable(f"replica {replica}, which holds the data, is away", code="no_replica")
    return f"{member.info.data_url.rstrip('/')}/data"


def split(data: bytes, shares: int) -> list[bytes]:
    """Line i goes to share i mod `shares`; the others have an empty line there, so that errors name the right one."""
    lines = data.split(b"\n")
    return [b"\n".join(line if i % shares == share else b"" for i, line in enumerate(lines)) for share in range(shares)]


def join(shares: Sequence[bytes]) -> bytes:
    """What `split` was given; b"" stands for a share of blank lines only."""
    return b"\n".join(map(b"".join, zip_longest(*(share.split(b"\n") for share in shares), fillvalue=b"")))


async def send(
    session: aiohttp.ClientSession, url: str, data: bytes, query: Mapping[str, str], field: str = "file"
) -> int:
    """How many samples a replica took. Raises Unavailable, or InvalidRequest about `field`."""
    body = await _ask(session, "POST", url, query, field, data)
    return int(body["samples"])


async def remove(session: aiohttp.ClientSession, url: str, query: Mapping[str, str], field: str = "id") -> int:
    """How many files a replica took away. Raises Unavailable, or InvalidRequest about `field`."""
    return int((await _ask(session, "DELETE", url, query, field))["deleted"])


async def fetch(session: aiohttp.ClientSession, url: str, query: Mapping[str, str]) -> bytes | None:
    """What a replica has under a name; None for nothing. Raises Unavailable."""
    try:
        async with session.get(url, params=query) as reply:
            if reply.status == 200:
                return await reply.read()
            if reply.status == 404:
                return None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"a replica does not answer: {error}", code="no_replica") from error
    raise Unavailable("a replica cannot read it", code="no_replica")


async def _ask(
    session: aiohttp.ClientSession, method: str, url: str, query: Mapping[str, str], field: str, data: bytes = b""
) -> dict[str, Any]:
    try:
        async with session.request(method, url, data=data or None, params=query) as reply:
            body: dict[str, Any] = await reply.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"a replica does not answer: {error}", code="no_replica") from error
    if reply.status == 200:
        return body
    if reply.status < 500:
        raise InvalidRequest(f"{field}: {body['error']['message']}", param=field, code="invalid_data")
    raise Unavailable("a replica cannot do it", code="no_replica")
