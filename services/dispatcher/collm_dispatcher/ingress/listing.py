"""Lists in OpenAI's shape, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import MsgspecError, Struct
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common.errors import Damaged, InvalidRequest
from collm_common.trouble import TROUBLES, fault, written

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


@contextmanager
def legible(key: str) -> Iterator[None]:
    """What cannot be read of `key` in this block is Damaged, counted, and logged once."""
    try:
        yield
    except (ValueError, KeyError, TypeError, MsgspecError, ResponseError) as error:
        if isinstance(error, ResponseError) and not fault(error):
            raise
        TROUBLES.skip(key, error)
        raise Damaged(key) from error


class Page(Struct, frozen=True):
    """At most `limit` entries behind the one of id `after`; the newest first, unless the `oldest` are to be."""

    limit: int = DEFAULT_LIMIT
    after: str = ""
    oldest: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str], default: int = DEFAULT_LIMIT, most: int = MAX_LIMIT) -> Page:
        """Raises InvalidRequest."""
        text, order = query.get("limit", str(default)), query.get("order", "desc")
        if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= most:
            raise InvalidRequest(f"limit: must be 1 to {most}", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order: must be asc or desc", param="order")
        return cls(int(text), query.get("after", ""), order == "asc")

    def behind(self, ids: Sequence[str]) -> int:
        """Where this page begins among all ids. Raises InvalidRequest."""
        if not self.after:
            return 0
        if self.after not in ids:
            raise InvalidRequest(f"after: no entry {self.after[:80]!r}", param="after")
        return ids.index(self.after) + 1

    def envelope(self, data: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
        """The list around its entries."""
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return {"object": "list", "data": list(data), "has_more": more, **ends}


async def listed(redis: Redis, key: str, page: Page) -> tuple[list[str], bool]:
    """Ids of a sorted set from the newest, or oldest, on, and whether there are more."""
    start = 0
    if page.after:
        rank = await (redis.zrank if page.oldest else redis.zrevrank)(key, page.after)
        if rank is None:
            raise InvalidRequest(f"after: no entry {page.after[:80]!r}", param="after")
        start = int(rank) + 1
    ids = await redis.zrange(key, start, start + page.limit, desc=not page.oldest)
    return list(written(key, ids[: page.limit])), len(ids) > page.limit
