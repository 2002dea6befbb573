"""LoRA slots: adapters of different ranks and the base model in one batch.

All slots of a linear lie side by side, A `[slots * max_rank, in]` and B `[out, slots * max_rank]` with alpha / rank
folded in; a mask `[T, slots * max_rank]` between the two products keeps each token to its own slot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from collm_common.errors import AdapterError

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


class SlotLinear(nn.Module):
    """`base(x)` plus the token's own low-rank update."""

    def __init__(self, base: nn.Linear, bank: SlotBank, width: int) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        self.a = torch.zeros(width, base.in_features, dtype=weight.dtype, device=weight.device)
        self.b = torch.zeros(base.out_features, width, dtype=weight.dtype, device=weight.device)
        self.slots: set[int] = set()
        self._bank = (bank,)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., T, in]` -> `[..., T, out]`."""
        y: Tensor = self.base(x)
        bank = self._bank[0]
        if bank.mask is None or self.slots.isdisjoint(bank.active):
            return y
        low = linear(x.reshape(-1, x.shape[-1]), self.a[bank.columns]) * bank.mask
        y.view(-1, y.shape[-1]).addmm_(low, self.b[:, bank.columns].t())
        return y


class SlotBank:
    """The slots of one model. Wraps every linear of its decoder layers, once.

    `active`, `columns` and `mask` are of the pack that runs: the slots in it, the columns from the first to the last
    of them, and which columns each token may use; no mask: no adapter at all.
    """

    def __init__(self, model: nn.Module, layers: nn.Module, slots: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self.active: frozenset[int] = frozenset()
        self.columns = slice(0, 0)
        self.mask: Tensor | None = None
        names = {id(module): name for name, module in model.named_modules()}
        self._linears: dict[str, SlotLinear] = {}
        for parent in list(layers.modules()):
            for child, module in list(parent.named_children()):
                if isinstance(module, nn.Linear) and slots:
                    wrapped = SlotLinear(module, self, slots * max_rank)
                    setattr(parent, child, wrapped)
                    self._linears[names[id(module)]] = wrapped

    def select(self, token_slots: Sequence[int]) -> None:
        """Say which slot each token of the next call uses, -1 for none."""
        self.active = frozenset(token_slots) - {-1}
        if not self.active:
            self.mask = None
            return
        first, last = min(self.active), max(self.active)
        self.columns = slice(first * self.max_rank, (last + 1) * self.max_rank)
        like = next(iter(self._linears.values())).a
        owners = torch.arange(first, last + 1, device=like.device).repeat_interleave(self.max_rank)
        self.mask = (torch.tensor(token_slots, device=like.device)[:, None] == owners).to(like.dtype)

    @torch.inference_mode()
    def load(self, slot: int, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> None:
        """Write an adapter into a slot after all of it was checked. Raises AdapterError that names the tensor."""
        pairs = self._check(tensors, rank)
        self.clear(slot)
        start = slot * self.max_rank
        for name, (a, b) in pairs.items():
            target = self._linears[name]
            target.a[start : start + rank].copy_(a)
            target.b[:, start : start + rank].copy_(b.float() * (alpha / rank))
            target.slots.add(slot)

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot."""
        columns = slice(slot * self.max_rank, (slot + 1) * self.max_rank)
        for target in self._linears.values():
            if slot in target.slots:
                target.a[columns].zero_()
                target.b[:, columns].zero_()
                target.slots.remove(slot)

    def _check(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        if not 1 <= rank <= self.max_rank:
            raise AdapterError(f"rank {rank} is not in 1..{self.max_rank}")
        sides: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, side = self._locate(name)
            self._check_tensor(name, tensor, side, self._linears[module], rank)
            sides.setdefault(module, {})[side] = tensor
        if not sides:
            raise AdapterError("the adapter has no tensors")
        for module, pair in sides.items():
            if len(pair) < 2:
                missing = "B" if "A" in pair else "A"
                raise AdapterError(f"tensor base_model.model.{module}.lora_{missing}.weight is missing")
        return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}

    def _locate(self, name: str) -> tuple[str, str]:
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in self._linears:
            raise AdapterError(f"tensor {name} belongs to no linear layer that can be adapted here")
        return match["module"], match["side"]

    @staticmethod
    def _check_tensor(name: str, tensor: Tensor, side: str, target: SlotLinear, rank: int) -> None:
        base = target.base
        want = (rank, base.in_features) if side == "A" else (base.out_features, rank)
        if tuple(tensor.shape) != want:
            raise AdapterError(f"tensor {name} has shape {tuple(tensor.shape)}, not {want}")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"tensor {name} has values that are not finite numbers")
