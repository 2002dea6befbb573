"""Adapters from outside: a folder as PEFT saves it, checked as far as that needs neither the model nor torch."""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from safetensors import SafetensorError, deserialize

from collm_common.errors import AdapterError
from collm_common.types import AtLeastOne

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_ALPHA = 1 << 20, 65_536.0
SIDES = (".lora_A.weight", ".lora_B.weight")


class _Config(Struct):
    """The fields of adapter_config.json that say what the tensors mean; those of one value are not served otherwise."""

    r: AtLeastOne
    lora_alpha: Annotated[float, Meta(gt=0, le=MAX_ALPHA)]
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
    config = _config(_content(folder / CONFIG, MAX_CONFIG_BYTES))
    data = _content(folder / TENSORS, max_bytes)
    modules = _modules(data, config.r)
    # rsLoRA (Kalajdzievski 2023) scales by alpha / sqrt(r) instead of alpha / r.
    alpha = config.lora_alpha * (math.sqrt(config.r) if config.use_rslora else 1.0)
    return OutsideAdapter(data, config.r, alpha, modules, config.base_model_name_or_path or "")


def _content(path: Path, max_bytes: int) -> bytes:
    """Of a file that lies here itself: a link could name any file that this process may read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AdapterError(f"{path.name}: is a symbolic link, which is not followed") from error
        raise AdapterError(f"{path.name}: cannot be read in {path.parent.name}: {error.strerror}") from error
    with open(file, "rb") as opened:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise AdapterError(f"{path.name}: is no file")
        if about.st_size > max_bytes:
            raise AdapterError(f"{path.name}: has {about.st_size} bytes, the limit is {max_bytes}")
        try:
            return opened.read(max_bytes)
        except OSError as error:
            raise AdapterError(f"{path.name}: {error.strerror}") from error


def _config(data: bytes) -> _Config:
    try:
        config = msgspec.json.decode(data, type=_Config)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{CONFIG}: {error}") from error
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(config, name):
            raise AdapterError(f"{CONFIG}: {name} is not supported: all modules have one rank and one alpha")
    return config


def _modules(data: bytes, rank: int) -> tuple[str, ...]:
    try:
        shapes = {name: tuple(about["shape"]) for name, about in deserialize(data)}  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AdapterError(f"{TENSORS}: {error}") from error
    if not shapes:
        raise AdapterError(f"{TENSORS}: has no tensors")
    for name, shape in shapes.items():
        if not name.endswith(SIDES):
            raise AdapterError(f"{TENSORS}: {name[:200]} is neither lora_A.weight nor lora_B.weight of a linear layer")
        if len(shape) != 2 or shape[name.endswith(SIDES[1])] != rank:
            raise AdapterError(f"{TENSORS}: {name[:200]} has shape {shape}, which is not of rank {rank}")
    return tuple(sorted({name.rsplit(".", 3)[-3] for name in shapes}))
