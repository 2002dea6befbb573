"""Properties of the block pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_replica.engine.kv import NULL_BLOCK, BlockPool, block_bytes


@given(
    blocks=st.integers(2, 20),
    block_tokens=st.integers(1, 5),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=60),
)
def test_no_block_has_two_owners_and_none_is_lost(blocks: int, block_tokens: int, moves: list[tuple[int, int]]) -> None:
    """Catches a block handed out twice, the null block handed out, a partial growth, and leaks."""
    pool = BlockPool(blocks, block_tokens)
    held: list[list[int]] = [[], [], [], []]
    for owner, tokens in moves:
        before, free = list(held[owner]), pool.free
        if pool.needed(tokens) >= len(before):
            grown = pool.grow(held[owner], tokens)
            assert grown == (pool.needed(tokens) - len(before) <= free)
            assert held[owner][: len(before)] == before
            assert grown or held[owner] == before
        else:
            pool.shrink(held[owner], tokens)
        owned = [block for blocks_ in held for block in blocks_]
        assert len(set(owned)) == len(owned)
        assert NULL_BLOCK not in owned
        assert len(owned) + pool.free == blocks - 1
        assert len(held[owner]) * block_tokens >= tokens or held[owner] == before
    for blocks_ in held:
        pool.shrink(blocks_, 0)
    assert pool.free * block_tokens == pool.capacity_tokens


def test_a_pool_without_a_usable_block_is_refused() -> None:
    """Catches an engine that could never run anything."""
    with pytest.raises(ValueError, match="too few"):
        BlockPool(1, 16)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    """Catches a budget that is overrun twofold."""
    assert block_bytes(layers=30, kv_heads=3, head_dim=64, block_tokens=16, item_bytes=4) == 2 * 30 * 3 * 64 * 16 * 4
