"""Adapter versions as bytes: PEFT's own tensor names in safetensors, bf16, with a manifest that is checked first."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import load_file, save

from collm_common.errors import AdapterError
from collm_common.types import AdapterManifest

Tensors = Mapping[str, torch.Tensor]


def encode(tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> bytes:
    """safetensors bytes of all tensors in `dtype`."""
    return save({name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()})


def manifest(
    data: bytes,
    tensors: Tensors,
    *,
    name: str,
    version: int,
    base_digest: str,
    alpha: float,
    parent: int = 0,
    job: str = "",
) -> AdapterManifest:
    """Describe encoded tensors."""
    return AdapterManifest(
        name=name,
        version=version,
        base_digest=base_digest,
        rank=max(tensor.shape[0] for key, tensor in tensors.items() if ".lora_A." in key),
        alpha=alpha,
        modules=tuple(sorted({key.split(".lora_")[0].rsplit(".", 1)[-1] for key in tensors})),
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        parent=parent,
        job=job,
    )


def decode(data: bytes, about: AdapterManifest) -> dict[str, torch.Tensor]:
    """Float32 tensors; AdapterError names what does not hold: digest, format, values, shapes or modules."""
    if hashlib.sha256(data).hexdigest() != about.sha256:
        raise AdapterError(f"adapter {about.name}@v{about.version}: the bytes do not have the manifest's sha256")
    try:
        tensors = tensors_of(data)
        for name, tensor in tensors.items():
            _check(name, tensor, about)
        _check_pairs(tensors)
    except AdapterError as error:
        raise AdapterError(f"adapter {about.name}@v{about.version}: {error}") from error
    return tensors


def tensors_of(data: bytes) -> dict[str, torch.Tensor]:
    """Float32 tensors of safetensors bytes. Raises AdapterError."""
    try:
        return {name: tensor.float() for name, tensor in load_tensors(data).items()}
    except SafetensorError as error:
        raise AdapterError(f"no safetensors: {error}") from error


def _check(name: str, tensor: torch.Tensor, about: AdapterManifest) -> None:
    module, is_a = name.split(".lora_")[0].rsplit(".", 1)[-1], ".lora_A." in name
    if module not in about.modules or not (is_a or ".lora_B." in name):
        raise AdapterError(f"{name} is not of the manifest's modules {about.modules}")
    if tensor.dim() != 2 or tensor.shape[0 if is_a else 1] > about.rank:
        raise AdapterError(f"{name} has shape {tuple(tensor.shape)}, over the manifest's rank {about.rank}")
    if not torch.isfinite(tensor).all():
        raise AdapterError(f"{name} has values that are not finite")


def _check_pairs(tensors: Tensors) -> None:
    ranks: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        layer, _, factor = name.partition(".lora_")
        ranks.setdefault(layer, {})[factor] = tensor.shape[0 if factor == "A.weight" else 1]
    for layer, found in ranks.items():
        if set(found) != {"A.weight", "B.weight"}:
            raise AdapterError(f"{layer} has {sorted(found)}, must have lora_A.weight and lora_B.weight")
        if len(set(found.values())) > 1:
            raise AdapterError(f"{layer}: the ranks of A and B differ: {found}")


def write_file(path: Path, tensors: Tensors) -> None:
    """For another process of this replica; whole or not there."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(encode(tensors))
    partial.rename(path)


def read_file(path: Path) -> dict[str, torch.Tensor]:
    """Float32 tensors of a file written by `write_file`. Raises AdapterError if it is gone or damaged."""
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path.name}: {error}") from error
