"""Triton kernels between the matrix products: each does in one pass what the reference does in several.

LoRA enters as its second product: `low` `[T, slots, parts, rank]` is the first one's result, `b` `[slots, rank, out]`
the factors, and a token's own slot is selected on the way in. T is the number of tokens everywhere.

They round where the reference rounds, so that both choose the same tokens. None is compiled anew for another number of
tokens (`count`): that would stop every stream for a second at the first prompt of that length.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _low(
    low,
    low_stride,
    slots,
    tokens,
    valid,
    part,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SR: tl.constexpr,
    K: tl.constexpr,
):
    """`[tokens, K]` of one part, zero outside each token's own slot."""
    k = tl.arange(0, K)
    slot, rank = k // RANK, k % RANK
    own = tl.load(slots + tokens, mask=valid, other=-1)
    places = tokens.to(tl.int64)[:, None] * low_stride + ((slot * PARTS + part) * RANK + rank)[None, :]
    return tl.load(low + places, mask=(own[:, None] == slot[None, :]) & (k < SR)[None, :], other=0.0)


@triton.jit
def _factors(b, columns, valid, OUT: tl.constexpr, SR: tl.constexpr, K: tl.constexpr):
    """`[K, columns]` of all slots."""
    k = tl.arange(0, K)
    return tl.load(b + k[:, None] * OUT + columns[None, :], mask=(k < SR)[:, None] & valid[None, :], other=0.0)


@triton.jit
def _rounded(value, like):
    """To the precision of what `like` points to, and back."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def add_norm(x, y, y_stride, weight, total, h, eps, D: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """total = x + y (where ADD), h = total normalised; one program a token."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    valid = at < D
    value = tl.load(x + row * D + at, mask=valid, other=0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(y + row * y_stride + at, mask=valid, other=0.0)).to(value.dtype)
        tl.store(total + row * D + at, value, mask=valid)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / D + eps)
    tl.store(h + row * D + at, wide * scale * tl.load(weight + at, mask=valid, other=0.0).to(tl.float32), mask=valid)


@triton.jit(do_not_specialize=["count"])
def add_lora(
    x,
    y,
    y_stride,
    low,
    low_stride,
    b,
    slots,
    total,
    count,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    SR: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """total = x + y + low @ b."""
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    here, inside = tokens < count, columns < OUT
    valid = here[:, None] & inside[None, :]
    update = tl.dot(
        _low(low, low_stride, slots, tokens, here, 0, 1, RANK, SR, K), _factors(b, columns, inside, OUT, SR, K)
    )
    rows = tokens.to(tl.int64)[:, None]
    update += tl.load(y + rows * y_stride + columns[None, :], mask=valid, other=0.0).to(tl.float32)
    value = tl.load(x + rows * OUT + columns[None, :], mask=valid, other=0.0).to(tl.float32)
    value += _rounded(update, x)
    tl.store(total + rows * OUT + columns[None, :], value, mask=valid)


@triton.jit(do_not_specialize=["count"])
def gated(
    y,
    y_stride,
    low,
    low_stride,
    b,
    slots,
    z,
    count,
    HALF: tl.constexpr,
    LORA: tl.constexpr,
    RANK: tl.constexpr,
    SR: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """z = SiLU(gate) * up, where y is gate and up side by side."""
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    here, inside = tokens < count, columns < HALF
    valid = here[:, None] & inside[None, :]
    rows = tokens.to(tl.int64)[:, None]
    gate = tl.load(y + rows * y_stride + columns[None, :], mask=valid, other=0.0).to(tl.float32)
    up = tl.load(y + rows * y_stride + (HALF + columns)[None, :], mask=valid, other=0.0).to(tl.float32)
    if LORA:
        gate += tl.dot(
            _low(low, low_stride, slots, tokens, here, 0, 2, RANK, SR, K), _factors(b, columns, inside, 2 * HALF, SR, K)
        )
        up += tl.dot(
            _low(low, low_stride, slots, tokens, here, 1, 2, RANK, SR, K),
            _factors(b, HALF + columns, inside, 2 * HALF, SR, K),
        )
        gate, up = _rounded(gate, y), _rounded(up, y)
    act = _rounded(gate * tl.sigmoid(gate), y)
    tl.store(z + rows * HALF + columns[None, :], act * up, mask=valid)


@triton.jit(do_not_specialize=["count"])
def heads(
    y,
    y_stride,
    low,
    low_stride,
    b,
    slots,
    cos,
    sin,
    places,
    q_norm,
    k_norm,
    query,
    keys,
    values,
    count,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
    RANK: tl.constexpr,
    SR: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
):
    """Rotated queries to `query` `[T, H, D]`, rotated keys and values into the cache; one program a head and BT tokens.

    A place below zero is nowhere.
    """
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    here = tokens < count
    at = tl.arange(0, HALF)
    rows = tokens.to(tl.int64)[:, None]
    first, second = head * D + at, head * D + HALF + at
    one = tl.load(y + rows * y_stride + first[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    two = tl.load(y + rows * y_stride + second[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    if LORA:
        part = (head >= H).to(tl.int32) + (head >= H + KV).to(tl.int32)
        mine = _low(low, low_stride, slots, tokens, here, part, 3, RANK, SR, K)
        every = at >= 0
        one += tl.dot(mine, _factors(b, first, every, (H + 2 * KV) * D, SR, K))
        two += tl.dot(mine, _factors(b, second, every, (H + 2 * KV) * D, SR, K))
        one, two = _rounded(one, y), _rounded(two, y)
    if head < H + KV:
        if NORM:
            weight = q_norm if head < H else k_norm
            scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / D + eps)[:, None]
            one = one * scale * tl.load(weight + at).to(tl.float32)[None, :]
            two = two * scale * tl.load(weight + HALF + at).to(tl.float32)[None, :]
            one, two = _rounded(one, y), _rounded(two, y)
        angle = rows * D + at[None, :]
        c = tl.load(cos + angle, mask=here[:, None], other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=here[:, None], other=0.0).to(tl.float32)
        turned = _rounded(one * c, y) - _rounded(two * s, y)
        two = _rounded(two * c, y) + _rounded(one * s, y)
        one = turned
    if head < H:
        out = query + (rows * H + head) * D + at[None, :]
        tl.store(out, one, mask=here[:, None])
        tl.store(out + HALF, two, mask=here[:, None])
    else:
        place = tl.load(places + tokens, mask=here, other=-1).to(tl.int64)
        kept = (place >= 0)[:, None]
        if head < H + KV:
            out = keys + (place[:, None] * KV + head - H) * D + at[None, :]
        else:
            out = values + (place[:, None] * KV + head - H - KV) * D + at[None, :]
        tl.store(out, one, mask=kept)
        tl.store(out + HALF, two, mask=kept)


@triton.jit
def paged_decode(
    query,
    keys,
    values,
    tables,
    table_stride,
    positions,
    out,
    part,
    stat,
    scale,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
):
    """One token of each sequence against its pages; a program a sequence, key head and share of the context.

    With one split the result goes to `out` `[n, H, D]`, else to `part` `[n, H, SPLITS, D]` with the maximum and the
    sum of the exponentials in `stat` `[n, H, SPLITS, 2]` (Dao et al. 2023, "Flash-Decoding").
    """
    sequence, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // KV
    at, group = tl.arange(0, D), tl.arange(0, G)
    head = kv_head * GROUP + group
    mine = (group < GROUP)[:, None]
    q = tl.load(query + (sequence * H + head[:, None]) * D + at[None, :], mask=mine, other=0.0)
    end = tl.load(positions + sequence).to(tl.int32) + 1
    begin = tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BN) * BN
    low = begin + split * share
    high = tl.minimum(low + share, end)
    best = tl.full([G], float("-inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.zeros([G, D], tl.float32)
    for start in range(low, high, BN):
        token = start + tl.arange(0, BN)
        seen = token < high
        block = tl.load(tables + sequence * table_stride + token // BLOCK, mask=seen, other=0).to(tl.int64)
        row = ((block * BLOCK + token % BLOCK) * KV + kv_head) * D
        k = tl.load(keys + row[None, :] + at[:, None], mask=seen[None, :], other=0.0)
        score = tl.where(seen[None, :], tl.dot(q, k) * scale, float("-inf"))
        peak = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp(score - peak[:, None])
        fade = tl.exp(best - peak)
        v = tl.load(values + row[:, None] + at[None, :], mask=seen[:, None], other=0.0)
        acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v)
        total = total * fade + tl.sum(weight, 1)
        best = peak
    if SPLITS == 1:
        tl.store(out + (sequence * H + head[:, None]) * D + at[None, :], acc / total[:, None], mask=mine)
    else:
        place = (sequence * H + head) * SPLITS + split
        tl.store(part + place[:, None] * D + at[None, :], acc, mask=mine)
        tl.store(stat + place * 2, best, mask=group < GROUP)
        tl.store(stat + place * 2 + 1, total, mask=group < GROUP)


@triton.jit
def combine(part, stat, out, D: tl.constexpr, SPLITS: tl.constexpr):
    """The splits of one head of one sequence into `out`; a split without a token has the maximum -inf and sum 0."""
    head = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, SPLITS), tl.arange(0, D)
    best = tl.load(stat + (head * SPLITS + split) * 2)
    total = tl.load(stat + (head * SPLITS + split) * 2 + 1)
    share = tl.exp(best - tl.max(best, 0))
    acc = tl.load(part + (head * SPLITS + split[:, None]) * D + at[None, :])
    value = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * D + at, value)


def power_of_two(value: int) -> int:
    """The next one, at least 16: the smallest side of a matrix product."""
    size: Any = triton.next_power_of_2(max(16, value))
    return int(size)
