"""Which sequence owns which KV block."""

from __future__ import annotations

NULL_BLOCK = 0
"""Never owned and always zero: block tables are padded with it."""


class BlockPool:
    """Hands out blocks 1 .. blocks - 1 of `block_tokens` tokens each."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 2:
            raise ValueError(f"{blocks} KV blocks are too few: one is reserved and one must be usable")
        self.block_tokens = block_tokens
        self.capacity_tokens = (blocks - 1) * block_tokens
        self._free = list(range(blocks - 1, NULL_BLOCK, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def grow(self, held: list[int], tokens: int) -> bool:
        """Extend `held` until it holds `tokens` tokens; all or nothing. False if the pool is too empty."""
        missing = self.needed(tokens) - len(held)
        if missing > len(self._free):
            return False
        held.extend(self._free.pop() for _ in range(missing))
        return True

    def shrink(self, held: list[int], tokens: int) -> None:
        """Take back the blocks of `held` that `tokens` tokens do not need."""
        keep = self.needed(tokens)
        self._free.extend(reversed(held[keep:]))
        del held[keep:]


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_tokens: int, item_bytes: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * layers * kv_heads * head_dim * block_tokens * item_bytes
