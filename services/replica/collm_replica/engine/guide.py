"""What holds an answer to its schema, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from collm_common.errors import InvalidRequest

PARAM = "response_format"


class Guide(Protocol):
    """Of one answer."""

    def allowed(self) -> bytes:
        """One bit a token of the vocabulary, lowest first, in whole 32-bit words: 1 if it may come next."""

    def push(self, token: int) -> None:
        """The answer has one more token. Raises InternalError if it was not allowed."""


Guides = Callable[[str], Guide]
"""JSON schema -> a guide at its beginning. Raises InvalidRequest for a schema that cannot be followed."""


def unguided(schema: str) -> Guide:
    """Where nothing can follow a schema."""
    raise InvalidRequest(
        f"{PARAM}: this replica cannot hold answers to a schema; install the extra `structured`",
        param=PARAM,
        code="unsupported_parameter",
    )
