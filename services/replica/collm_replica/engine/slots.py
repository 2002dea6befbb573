"""LoRA slots: adapters of different ranks and the base model in one batch.

Each group of linears has the factors of all slots; a token's own slot is selected between the two products.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collm_common.errors import AdapterError
from collm_replica.engine.groups import Group
from collm_replica.engine.transfer import beside

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True)
class Place:
    """A linear as the `part`-th of its group."""

    group: Group
    part: int


Factors = Mapping[Group, tuple[Tensor, Tensor]]
"""What a slot gets: `[parts, max_rank, in]` and `[max_rank, out]` of each group, as they will lie there."""


class SlotBank:
    """Writes adapters into slots. `places` says where each linear's factors are, by the module's name.

    `stage` does what takes time, for any thread and beside the steps; `load` is a handful of copies on the device.
    """

    def __init__(self, places: Mapping[str, Place], max_rank: int) -> None:
        self._places = places
        self._max_rank = max_rank
        self._written: dict[int, set[Group]] = {}

    @torch.inference_mode()
    def stage(self, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> Factors:
        """Check an adapter and bring it to the device. Raises AdapterError that names the tensor."""
        staged: dict[Group, tuple[Tensor, Tensor]] = {}
        device = next(iter(self._places.values())).group.weight.device
        with beside(device):
            moved = {name: tensor.to(device) for name, tensor in tensors.items()}
            for name, (a, b) in self._check(moved, rank).items():
                group, part = self._places[name].group, self._places[name].part
                if group not in staged:
                    staged[group] = torch.zeros_like(group.a[0]), torch.zeros_like(group.b[0])
                staged[group][0][part, :rank] = a
                staged[group][1][:rank, group.columns[part]] = (b.float() * (alpha / rank)).t()
        return staged

    @torch.inference_mode()
    def load(self, slot: int, factors: Factors) -> None:
        """Write a whole slot; nothing is waited for."""
        for group in self._written.get(slot, set()) - factors.keys():
            group.a[slot].zero_()
            group.b[slot].zero_()
        sources = [side for pair in factors.values() for side in pair]
        copy: Any = torch._foreach_copy_
        copy([side[slot] for group in factors for side in (group.a, group.b)], sources)
        for source in sources:
            if source.is_cuda:
                source.record_stream(torch.cuda.current_stream())
        self._written[slot] = set(factors)

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
