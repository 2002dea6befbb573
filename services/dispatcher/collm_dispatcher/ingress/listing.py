"""Lists in OpenAI's shape: newest first, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis

from collm_common.errors import InvalidRequest

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


class Page(Struct, frozen=True):
    """At most `limit` entries behind the one of id `after`."""

    limit: int = DEFAULT_LIMIT
    after: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Page:
        """Raises InvalidRequest."""
        text = query.get("limit", str(DEFAULT_LIMIT))
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_LIMIT:
            raise InvalidRequest(f"limit: must be 1 to {MAX_LIMIT}", param="limit")
        return cls(int(text), query.get("after", ""))

    def envelope(self, data: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
        """The list around its entries."""
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return {"object": "list", "data": list(data), "has_more": more, **ends}


async def listed(redis: Redis, key: str, page: Page) -> tuple[list[str], bool]:
    """Ids of a sorted set from the newest on, and whether there are more."""
    start = 0
    if page.after:
        rank = await redis.zrevrank(key, page.after)
        if rank is None:
            raise InvalidRequest(f"after: no entry {page.after[:80]!r}", param="after")
        start = int(rank) + 1
    ids = await redis.zrevrange(key, start, start + page.limit)
    return [id_.decode() for id_ in ids[: page.limit]], len(ids) > page.limit
