"""Adapters from outside: a folder as PEFT saves it, checked as far as that needs neither the model nor torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from safetensors import SafetensorError, safe_open

from collm_common.errors import AdapterError
from collm_common.types import AtLeastOne, Positive

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
SIDES = (".lora_A.weight", ".lora_B.weight")


class _Config(Struct):
    """The fields of adapter_config.json that say what the tensors mean; those of one value are not served otherwise."""

    r: AtLeastOne
    lora_alpha: Positive
    peft_type: Literal["LORA"]
    base_model_name_or_path: str | None = None
    use_rslora: bool = False
    use_dora: Literal[False] | None = None
    bias: Literal["none"] = "none"
    fan_in_fan_out: Literal[False] | None = None
    modules_to_save: Literal[None] | tuple[()] = None
    rank_pattern: dict[str, Any] = {}
    alpha_pattern: dict[str, Any] = {}


class OutsideAdapter(Struct, frozen=True):
    """`data` is the safetensors file, `alpha` such that alpha / rank is the scale, `trained_on` the base it names."""

    data: bytes
    rank: int
    alpha: float
    modules: tuple[str, ...]
    trained_on: str


def read(folder: Path, max_bytes: int) -> OutsideAdapter:
    """Raises AdapterError that names the file and what is wrong with it."""
    config = _config(folder / CONFIG)
    path = folder / TENSORS
    if not path.is_file():
        raise AdapterError(f"{TENSORS}: there is no such file in {folder.name}; other formats are not read")
    size = path.stat().st_size
    if size > max_bytes:
        raise AdapterError(f"{TENSORS}: has {size} bytes, the limit is {max_bytes}")
    modules = _modules(path, config.r)
    # rsLoRA (Kalajdzievski 2023) scales by alpha / sqrt(r) instead of alpha / r.
    alpha = config.lora_alpha * (math.sqrt(config.r) if config.use_rslora else 1.0)
    return OutsideAdapter(path.read_bytes(), config.r, alpha, modules, config.base_model_name_or_path or "")


def _config(path: Path) -> _Config:
    try:
        if not path.is_file() and path.exists():
            raise AdapterError(f"{CONFIG}: is no file")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{CONFIG}: is over the limit of {MAX_CONFIG_BYTES} bytes")
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        raise AdapterError(f"{CONFIG}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{CONFIG}: {error}") from error
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(config, name):
            raise AdapterError(f"{CONFIG}: {name} is not supported: all modules have one rank and one alpha")
    return config


def _modules(path: Path, rank: int) -> tuple[str, ...]:
    try:
        with safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{TENSORS}: {error}") from error
    if not shapes:
        raise AdapterError(f"{TENSORS}: has no tensors")
    for name, shape in shapes.items():
        if not name.endswith(SIDES):
            raise AdapterError(f"{TENSORS}: {name[:200]} is neither lora_A.weight nor lora_B.weight of a linear layer")
        if len(shape) != 2 or shape[name.endswith(SIDES[1])] != rank:
            raise AdapterError(f"{TENSORS}: {name[:200]} has shape {shape}, which is not of rank {rank}")
    return tuple(sorted({name.rsplit(".", 3)[-3] for name in shapes}))
