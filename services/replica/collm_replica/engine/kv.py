"""Which sequences own which KV block, and which blocks still hold tokens that nobody owns any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Never owned and always zero: block tables are padded with it."""


class BlockPool:
    """Hands out blocks 1 .. blocks - 1 of `block_tokens` tokens each.

    A full block may be kept under a key that tells its content; then it has any number of owners, none of whom writes
    to it. When the last has left, it stays until its room is needed; the one that was left first goes first.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        if blocks < 2:
            raise ValueError(f"{blocks} KV blocks are too few: one is reserved and one must be usable")
        self.block_tokens = block_tokens
        self.capacity_tokens = (blocks - 1) * block_tokens
        self._free = list(range(blocks - 1, NULL_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * blocks
        self._keys: dict[int, bytes] = {}
        self._kept: dict[bytes, int] = {}
        self._suspects: set[int] = set()
        self.soiled: list[int] = []
        """Blocks that must be zeroed before the next run writes to them."""

    @property
    def free(self) -> int:
        """Blocks that can be had: those that hold nothing and those that are only kept."""
        return len(self._free) + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the blocks that have an owner, in 0..1."""
        return 1 - self.free * self.block_tokens / self.capacity_tokens

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def grow(self, held: list[int], tokens: int) -> bool:
        """Extend `held` until it holds `tokens` tokens; all or nothing. False if the pool is too empty."""
        missing = self.needed(tokens) - len(held)
        if missing > self.free:
            return False
        held.extend(self._take() for _ in range(missing))
        return True

    def shrink(self, held: list[int], tokens: int) -> None:
        """Take back the blocks of `held` that `tokens` tokens do not need."""
        keep = self.needed(tokens)
        # From the end: what others could go on with only after the blocks before it is the first to be given up.
        for block in reversed(held[keep:]):
            self._leave(block)
        del held[keep:]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the first keys, up to the first that is not kept. They are nobody's before `share`."""
        found = []
        for key in keys:
            if key not in self._kept:
                break
            found.append(self._kept[key])
        return found

    def fits(self, found: Sequence[int], tokens: int) -> bool:
        """Whether an owner of the found blocks could grow to `tokens` tokens."""
        idle = sum(not self._owners[block] for block in found)
        return self.needed(tokens) - len(found) <= self.free - idle

    def share(self, held: list[int], found: Sequence[int]) -> None:
        """Begin an empty `held` with found blocks."""
        for block in found:
            self._own(block)
        held.extend(found)

    def keep(self, held: list[int], number: int, key: bytes) -> None:
        """Keep a block of `held`, full and written, under its key. If its content is kept already, that is held now."""
        block, kept = held[number], self._kept.setdefault(key, held[number])
        if kept == block:
            self._keys[block] = key
            return
        self._own(kept)
        held[number] = kept
        self._leave(block)

    def distrust(self, held: Sequence[int]) -> None:
        """What `held` has may be broken: nobody finds it any more, and it is soiled when its last owner leaves."""
        for block in held:
            self._forget(block)
        self._suspects.update(held)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._owners[block] = 1
        return block

    def _own(self, block: int) -> None:
        self._idle.pop(block, None)
        self._owners[block] += 1

    def _leave(self, block: int) -> None:
        self._owners[block] -= 1
        if self._owners[block]:
            return
        if block in self._keys:
            self._idle[block] = None
            return
        self._free.append(block)
        if block in self._suspects:
            self._suspects.remove(block)
            self.soiled.append(block)

    def _forget(self, block: int) -> None:
        if block in self._keys:
            del self._kept[self._keys.pop(block)]


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_tokens: int, item_bytes: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * layers * kv_heads * head_dim * block_tokens * item_bytes
