"""Linears that read the same input, as one matrix product; LoRA slots beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from collm_replica.engine.transfer import upload


class Group:
    """`weight` `[out, in]` and `bias` `[out]` hold the rows of all `linears`, whose own parameters become views.

    `a` `[slots, parts, max_rank, in]` and `b` `[slots, max_rank, out]` are the low-rank factors of every slot, with
    alpha / rank folded into `b`; `wide` is `weight` with the rows of `a` behind it, if that is how they lie in memory,
    and `wide_bias` the bias with as many zeros.
    """

    def __init__(self, linears: Sequence[Any], slots: int, max_rank: int, bank: Tensor | None = None) -> None:
        """Of `nn.Linear`s. `bank` is zeroed memory for `a`, `[slots * parts * max_rank, in]`; None: allocate it."""
        self.linears = tuple(linears)
        self.weight = join([part.weight for part in linears])
        biases: list[nn.Parameter] = [part.bias for part in linears if part.bias is not None]
        self.bias = join(biases) if biases else None
        self.splits = [part.out_features for part in linears]
        self.slots, self.max_rank = slots, max_rank
        out, inner = self.weight.shape
        rows = slots * len(self.splits) * max_rank
        if bank is None:
            bank = self.weight.new_zeros(rows, inner)
        self.wide = _spanning([self.weight, bank]) if rows else None
        self.wide_bias = None if self.bias is None else torch.cat((self.bias, self.bias.new_zeros(rows)))
        self.a = bank.view(slots, len(self.splits), max_rank, inner)
        self.b = self.weight.new_zeros(slots, max_rank, out)

    @property
    def columns(self) -> list[slice]:
        """Where each linear's outputs lie."""
        ends = torch.tensor(self.splits).cumsum(0).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.splits, strict=True)]


@dataclass(frozen=True)
class Selection:
    """Which slot each token of a pack uses: `slots` `[T]` with -1 for none; `first` to `last` are in use."""

    slots: Tensor
    first: int
    last: int
    dtype: torch.dtype

    @classmethod
    def of(cls, token_slots: Sequence[int], like: Tensor) -> Selection | None:
        """None if no token has an adapter: then none is paid for."""
        used = set(token_slots) - {-1}
        if not used:
            return None
        return cls(upload(token_slots, torch.int32, like.device), min(used), max(used), like.dtype)

    @cached_property
    def mask(self) -> Tensor:
        """`[T, used slots, 1, 1]`, one where the slot is the token's own."""
        numbers = torch.arange(self.first, self.last + 1, device=self.slots.device)
        return (self.slots[:, None] == numbers).to(self.dtype)[:, :, None, None]


def project(group: Group, x: Tensor, selection: Selection | None) -> Tensor:
    """`[T, in]` -> `[T, out]` with each token's own low-rank update."""
    y = linear(x, group.weight, group.bias)
    if selection is None:
        return y
    used = slice(selection.first, selection.last + 1)
    count, parts = selection.last + 1 - selection.first, len(group.splits)
    low = linear(x, group.a[used].flatten(0, 2)).view(-1, count, parts, group.max_rank) * selection.mask
    b = group.b[used].flatten(0, 1)
    for part, columns in enumerate(group.columns):
        y[:, columns].addmm_(low[:, :, part].flatten(1), b[:, columns])
    return y


def join(parts: Sequence[nn.Parameter]) -> Tensor:
    """The rows of `parts` as one tensor, whose views they are from now on; nothing is copied if they lie in a row."""
    whole = _spanning([part.data for part in parts])
    if whole is None:
        whole = torch.cat([part.data for part in parts])
        for part, rows in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
            part.data = rows
    return whole


def _spanning(parts: Sequence[Tensor]) -> Tensor | None:
    """One view over tensors of equal row shape that follow one another in the same memory."""
    first = parts[0]
    base = first.untyped_storage().data_ptr()
    for before, after in pairwise(parts):
        same = before.is_contiguous() and after.is_contiguous() and after.untyped_storage().data_ptr() == base
        if not same or before.data_ptr() + before.nbytes != after.data_ptr():
            return None
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
