"""Keys of token blocks: equal for the same tokens, after the same tokens, under the same weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


class Chain:
    """The keys of a sequence's full blocks. A key is the hash of the key before it and of the block's tokens.

    The first follows `weights`, a number that no two sets of weights share. A cryptographic hash: who chooses prompts
    must not be able to make two that are taken for one another.
    """

    def __init__(self) -> None:
        self._weights = -1
        self._keys: list[bytes] = []

    def keys(self, weights: int, tokens: Sequence[int], block_tokens: int, end: int) -> list[bytes]:
        """Of the full blocks among the first `end` tokens; those that were asked for before are remembered."""
        if weights != self._weights:
            self._weights = weights
            self._keys.clear()
        for start in range(len(self._keys) * block_tokens, end - block_tokens + 1, block_tokens):
            before = self._keys[-1] if self._keys else array("q", [weights]).tobytes()
            block = array("q", tokens[start : start + block_tokens]).tobytes()
            self._keys.append(blake2b(before + block, digest_size=KEY_BYTES).digest())
        return self._keys[: end // block_tokens]
