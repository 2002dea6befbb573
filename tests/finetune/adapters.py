"""Small random adapters of two layers, and updates made of them."""

from __future__ import annotations

import torch

from collm_replica.finetune.screening import Update

LAYERS = {"l0.q_proj": (24, 16), "l1.down_proj": (10, 30)}


def adapter(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """Both factors drawn."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (rows, columns) in LAYERS.items():
        tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return tensors


def fresh(rank: int) -> dict[str, torch.Tensor]:
    """A drawn, B zero."""
    return {name: tensor * (".lora_A." in name) for name, tensor in adapter(0, rank).items()}


def update(seed: int, rank: int = 4, samples: int = 8, steps: int = 5, client: str = "") -> Update:
    """Of client `c{seed}`, at scale 2."""
    return Update(client or f"c{seed}", adapter(seed, rank), samples, steps, 2.0)


def products(tensors: dict[str, torch.Tensor] | object) -> dict[str, torch.Tensor]:
    """B A of every layer, in full."""
    assert isinstance(tensors, dict)
    return {layer: tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"] for layer in LAYERS}
