"""LoRA slots: adapters of different ranks and the base model in one batch.

Each group of linears has the factors of all slots; a token's own slot is selected between the two products.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from collm_common.errors import AdapterError
from collm_replica.engine.groups import Group

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True)
class Place:
    """A linear as the `part`-th of its group."""

    group: Group
    part: int

    def a(self, slot: int, rank: int) -> Tensor:
        """`[rank, in]` of a slot."""
        return self.group.a[slot, self.part, :rank]

    def b(self, slot: int, rank: int) -> Tensor:
        """`[rank, out]` of a slot."""
        return self.group.b[slot, :rank, self.group.columns[self.part]]


class SlotBank:
    """Writes adapters into slots. `places` says where each linear's factors are, by the module's name."""

    def __init__(self, places: Mapping[str, Place], max_rank: int) -> None:
        self._places = places
        self._max_rank = max_rank
        self._written: dict[int, set[Group]] = {}

    @torch.inference_mode()
    def load(self, slot: int, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> None:
        """Write an adapter into a slot after all of it was checked. Raises AdapterError that names the tensor."""
        pairs = self._check(tensors, rank)
        self.clear(slot)
        for name, (a, b) in pairs.items():
            place = self._places[name]
            place.a(slot, rank).copy_(a)
            place.b(slot, rank).copy_((b.float() * (alpha / rank)).t())
        self._written[slot] = {self._places[name].group for name in pairs}

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zero a slot."""
        for group in self._written.pop(slot, ()):
            group.a[slot].zero_()
            group.b[slot].zero_()

    def _check(self, tensors: Mapping[str, Tensor], rank: int) -> dict[str, tuple[Tensor, Tensor]]:
        if not 1 <= rank <= self._max_rank:
            raise AdapterError(f"rank {rank} is not in 1..{self._max_rank}")
        sides: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            module, side = self._locate(name)
            self._check_tensor(name, tensor, side, self._places[module], rank)
            sides.setdefault(module, {})[side] = tensor
        if not sides:
            raise AdapterError("the adapter has no tensors")
        _check_finite(tensors)
        for module, pair in sides.items():
            if len(pair) < 2:
                missing = "B" if "A" in pair else "A"
                raise AdapterError(f"tensor base_model.model.{module}.lora_{missing}.weight is missing")
        return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}

    def _locate(self, name: str) -> tuple[str, str]:
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in self._places:
            raise AdapterError(f"tensor {name} belongs to no linear layer that can be adapted here")
        return match["module"], match["side"]

    @staticmethod
    def _check_tensor(name: str, tensor: Tensor, side: str, place: Place, rank: int) -> None:
        base = place.group.linears[place.part]
        want = (rank, base.in_features) if side == "A" else (base.out_features, rank)
        if tuple(tensor.shape) != want:
            raise AdapterError(f"tensor {name} has shape {tuple(tensor.shape)}, not {want}")
        if not tensor.is_floating_point():
            raise AdapterError(f"tensor {name} has values that are not finite numbers")


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    """One wait for the device, however many tensors there are."""
    if bool(torch.isfinite(torch.nn.utils.get_total_norm(list(tensors.values()), torch.inf))):
        return
    name = next(name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all()))
    raise AdapterError(f"tensor {name} has values that are not finite numbers")
