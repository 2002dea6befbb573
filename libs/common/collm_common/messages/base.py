"""What all messages have in common."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

SCHEMA = 1
Tokens = tuple[Annotated[int, Meta(ge=0)], ...]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


class Message(Struct, frozen=True, tag_field="kind", kw_only=True):
    """Base of all messages. Fields may be added with defaults; anything else raises SCHEMA."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA
