"""Properties of the block pool."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_replica.engine.chain import Chain
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


@dataclass
class Owner:
    """A sequence under `weights`; the keys and values of its first `computed` tokens are in its blocks."""

    weights: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    held: list[int] = field(default_factory=list)
    chain: Chain = field(default_factory=Chain)


class Device:
    """A pool, its owners, and a memory that holds what was written: everything that keys and values depend on."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.pool = BlockPool(blocks, block_tokens)
        self.blocks, self.size = blocks, block_tokens
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.owners = [Owner() for _ in range(4)]
        self.hits = 0

    def begin(self, index: int, weights: int, tokens: list[int]) -> None:
        """In the place of whoever was there."""
        self.pool.shrink(self.owners[index].held, 0)
        owner = self.owners[index] = Owner(weights, list(tokens))
        found = self.pool.find(owner.chain.keys(weights, tokens, self.size, len(tokens) - 1))
        free = self.pool.free
        if self.pool.fits(found, len(tokens)):
            self.pool.share(owner.held, found)
            owner.computed = len(found) * self.size
            self.hits += len(found)
            assert free >= self.pool.free
            trial = list(owner.held)
            assert self.pool.grow(trial, len(tokens)), "what fits can be had"
            del owner.held[:]
            owner.held += trial

    def compute(self, index: int, count: int) -> None:
        """Up to `count` more tokens, and one that they chose."""
        owner = self.owners[index]
        first, last = owner.computed, min(len(owner.tokens), owner.computed + count)
        if not self.pool.grow(owner.held, max(last, len(owner.held) * self.size)):
            return
        for at in range(first, last):
            block = owner.held[at // self.size]
            assert sum(block in other.held for other in self.owners) == 1, "a shared block is written"
            self.memory[block, at % self.size] = (owner.weights, *owner.tokens[: at + 1])
        owner.computed = last
        keys = owner.chain.keys(owner.weights, owner.tokens, self.size, last)
        for number in range(first // self.size, last // self.size):
            self.pool.keep(owner.held, number, keys[number])
        if last == len(owner.tokens):
            owner.tokens.append(last % 2)

    def check(self) -> None:
        """Nobody reads what was not computed for him; every block is in one place."""
        count = Counter(block for owner in self.owners for block in owner.held)
        assert all(self.pool._owners[block] == count[block] for block in range(self.blocks))
        places = [*self.pool._free, *self.pool._idle, *count]
        assert sorted(places) == list(range(1, self.blocks))
        assert self.pool.free == len(self.pool._free) + len(self.pool._idle)
        assert self.pool.usage == pytest.approx(len(count) / (self.blocks - 1))
        assert {block: key for key, block in self.pool._kept.items()} == self.pool._keys
        assert set(self.pool._idle) <= set(self.pool._keys)
        assert not set(self.pool._free) & set(self.pool._keys)
        for owner in self.owners:
            for at in range(owner.computed):
                cell = self.memory[owner.held[at // self.size], at % self.size]
                assert cell == (owner.weights, *owner.tokens[: at + 1])


@given(
    blocks=st.integers(2, 24),
    block_tokens=st.integers(1, 3),
    moves=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(("begin", "compute", "compute", "compute", "leave", "distrust")),
            st.integers(0, 1),
            st.lists(st.integers(0, 1), min_size=1, max_size=8),
        ),
        max_size=60,
    ),
)
def test_what_is_kept_is_read_by_those_it_is_right_for(
    blocks: int, block_tokens: int, moves: list[tuple[int, str, int, list[int]]]
) -> None:
    """Catches a block read by a sequence it was not computed for, written while shared, lost, or counted wrongly."""
    device = Device(blocks, block_tokens)
    for index, action, weights, tokens in moves:
        owner = device.owners[index]
        match action:
            case "begin":
                device.begin(index, weights, tokens)
            case "compute":
                device.compute(index, len(tokens))
            case "distrust":
                device.pool.distrust(owner.held)
                keys = owner.chain.keys(owner.weights, owner.tokens, block_tokens, owner.computed)
                assert not keys or not device.pool.find(keys)
        if action in ("leave", "distrust"):
            device.pool.shrink(owner.held, 0)
            device.owners[index] = Owner()
        device.check()
    for owner in device.owners:
        device.pool.shrink(owner.held, 0)
    assert device.pool.free == blocks - 1


def kept(pool: BlockPool, tokens: list[int], weights: int = 0) -> list[bytes]:
    """Keys of a sequence that was computed and has left."""
    held: list[int] = []
    assert pool.grow(held, len(tokens))
    keys = Chain().keys(weights, tokens, pool.block_tokens, len(tokens))
    for number, key in enumerate(keys):
        pool.keep(held, number, key)
    pool.shrink(held, 0)
    return keys


def test_the_first_that_was_left_is_the_first_to_go_and_a_prefix_goes_from_its_end() -> None:
    """Catches a cache that forgets what is used, or the start of a prefix while it keeps what needs the start."""
    pool = BlockPool(7, 2)
    old, new = kept(pool, [1, 2, 3, 4, 5, 6]), kept(pool, [7, 8, 9, 10, 11, 12])
    share: list[int] = []
    pool.share(share, pool.find(old[:1]))
    pool.shrink(share, 0)
    held: list[int] = []
    found = []
    for _ in range(6):
        assert pool.grow(held, 2 * len(held) + 2)
        found.append((len(pool.find(old)), len(pool.find(new))))
    assert found == [(2, 3), (1, 3), (1, 2), (1, 1), (1, 0), (0, 0)]


def test_what_is_kept_costs_no_room() -> None:
    """Catches a request that waits for blocks that nobody owns."""
    pool = BlockPool(5, 2)
    kept(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.free == 4
    assert pool.usage == 0
    held: list[int] = []
    assert pool.fits([], 8)
    assert pool.grow(held, 8)
    assert pool.usage == 1


def test_a_found_block_that_nobody_owns_is_not_counted_twice() -> None:
    """Catches an admission that takes a kept block both for found and for free."""
    pool = BlockPool(4, 2)
    keys = kept(pool, [1, 2, 3, 4])
    other: list[int] = []
    assert pool.grow(other, 2)
    found = pool.find(keys)
    assert len(found) == 2
    assert pool.fits(found, 4)
    assert not pool.fits(found, 6)


def test_two_that_computed_the_same_hold_one_block_of_it() -> None:
    """Catches memory that is used twice for one content, and a block that is left and stays."""
    pool = BlockPool(5, 2)
    first, second = list[int](), list[int]()
    key = Chain().keys(0, [1, 2], 2, 2)[0]
    for held in (first, second):
        assert pool.grow(held, 2)
    pool.keep(first, 0, key)
    pool.keep(second, 0, key)
    assert first == second
    assert pool.free == 3
    pool.shrink(first, 0)
    assert pool.free == 3
    pool.shrink(second, 0)
    assert pool.free == 4


def test_what_is_distrusted_is_soiled_once_its_last_owner_leaves() -> None:
    """Catches a block that is zeroed under somebody who reads it, and one that is never zeroed."""
    pool = BlockPool(4, 2)
    keys = kept(pool, [1, 2])
    first, second = list[int](), list[int]()
    for held in (first, second):
        pool.share(held, pool.find(keys))
    pool.distrust(first)
    pool.shrink(first, 0)
    assert not pool.soiled
    assert not pool.find(keys)
    block = second[0]
    pool.shrink(second, 0)
    assert pool.soiled == [block]


def test_keys_tell_tokens_their_order_what_came_before_and_the_weights() -> None:
    """Catches two contents under one key."""
    lists = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3], [0, 1, 2, 3, 4], [12, 3, 4]]
    keys = [Chain().keys(weights, tokens, 1, len(tokens)) for weights in (0, 1) for tokens in lists]
    assert len({each[-1] for each in keys}) == 2 * len(lists)
    chain = Chain()
    assert len(chain.keys(0, [1, 2, 3, 4, 5], 2, 5)) == 2
    assert chain.keys(0, [1, 2, 3, 4, 5], 2, 3) == Chain().keys(0, [1, 2], 2, 2)
    assert chain.keys(1, [1, 2], 2, 2) == Chain().keys(1, [1, 2], 2, 2)


def test_a_pool_without_a_usable_block_is_refused() -> None:
    """Catches an engine that could never run anything."""
    with pytest.raises(ValueError, match="too few"):
        BlockPool(1, 16)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    """Catches a budget that is overrun twofold."""
    assert block_bytes(layers=30, kv_heads=3, head_dim=64, block_tokens=16, item_bytes=4) == 2 * 30 * 3 * 64 * 16 * 4
