"""All base weights in one flat buffer that two processes use: a sealed memfd on a CPU, CUDA memory on a GPU.

Within a layer q, k, v and gate, up lie next to each other, so that one matrix product can serve a fused group while
other code uses the separate views.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import mmap
import os
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import safe_open
from transformers import PreTrainedModel

from collm_common.errors import ModelError

ALIGN = 256
HEADER_BYTES = 1 << 20
MAGIC = b"collm-weights-1\n"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
HASH_BYTES = 64 << 20
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD, DERIVED = "lm_head.weight", ".rotary_emb.inv_freq"

_FOLLOWS = ("k_proj", "v_proj", "up_proj")
_GROUP_ENDS = {"v_proj": ("qkv", 3), "o_proj": ("out", 1), "up_proj": ("gate_up", 2), "down_proj": ("down", 1)}
_ORDER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Views = Mapping[str, torch.Tensor]


class Place(Struct, frozen=True):
    """Where one tensor lies: byte offset in the buffer and shape."""

    offset: int
    shape: tuple[int, ...]


class Manifest(Struct, frozen=True):
    """The layout of a buffer of `size` bytes whose tensors all have `dtype` (a torch name).

    `banks` is room behind the weights of a fused group (`model.layers.N.GROUP`), which is no part of the weights.
    """

    size: int
    dtype: str
    places: dict[str, Place]
    banks: dict[str, Place] = {}

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def plan(folder: Path, dtype: torch.dtype, bank_rows: int = 0) -> Manifest:
    """The layout of a model folder's safetensors, tied tensors once; `bank_rows` of room a linear of a fused group.

    Raises ModelError without safetensors.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    tied = _is_tied(folder)
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if not (name.endswith(DERIVED) or (tied and name == HEAD)):
                    shapes[name] = tuple(file.get_slice(name).get_shape())
    return layout(shapes, dtype, bank_rows)


def layout(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, bank_rows: int = 0) -> Manifest:
    """Groups side by side, everything else aligned."""
    size, places, banks = 0, {}, {}
    for name in sorted(shapes, key=_position):
        if not any(f".{part}." in name for part in _FOLLOWS):
            size = -(-size // ALIGN) * ALIGN
        places[name] = Place(size, shapes[name])
        size += math.prod(shapes[name]) * dtype.itemsize
        if bank_rows and (group := _ends_group(name)):
            bank, parts = group
            shape = (parts * bank_rows, shapes[name][-1])
            banks[bank] = Place(size, shape)
            size += math.prod(shape) * dtype.itemsize
    return Manifest(size, str(dtype).removeprefix("torch."), places, banks)


def views(flat: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Each tensor as a view of the flat uint8 buffer."""
    return _views(flat, manifest.torch_dtype, manifest.places)


def banks(flat: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The room behind each fused group."""
    return _views(flat, manifest.torch_dtype, manifest.banks)


def _views(flat: torch.Tensor, dtype: torch.dtype, places: Mapping[str, Place]) -> dict[str, torch.Tensor]:
    found = {}
    for name, place in places.items():
        end = place.offset + math.prod(place.shape) * dtype.itemsize
        found[name] = flat[place.offset : end].view(dtype).view(place.shape)
    return found


# --- CPU: a memfd


def fill(fd: int, folder: Path, dtype: torch.dtype) -> None:
    """Load a model into an empty or half-filled memfd, then seal it: nobody can write to it any more.

    A memfd that is already complete is left as it is, so a restarted process has its weights at once, even if the files
    are gone. The seal is what marks it complete: a process killed before that leaves a buffer that is filled again.
    Raises ModelError if it is complete with another dtype.
    """
    if (present := _header(fd)) is not None:
        if present.torch_dtype != dtype:
            raise ModelError(f"the shared weights are {present.torch_dtype}, not {dtype}")
        return
    manifest = plan(folder, dtype)
    header = msgspec.msgpack.encode(manifest)
    if len(header) > HEADER_BYTES - 64:
        raise ModelError(f"the manifest has {len(header)} bytes, the limit is {HEADER_BYTES - 64}")
    os.ftruncate(fd, 0)
    os.ftruncate(fd, HEADER_BYTES + manifest.size)
    with mmap.mmap(fd, HEADER_BYTES + manifest.size) as memory:
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        _load(folder, views(flat[HEADER_BYTES:], manifest))
        del flat
        memory[len(MAGIC) + 8 : len(MAGIC) + 8 + len(header)] = header
        memory[: len(MAGIC) + 8] = MAGIC + len(header).to_bytes(8, "big")
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def attach(fd: int) -> tuple[dict[str, torch.Tensor], Manifest]:
    """The weights of a complete memfd, mapped read-only: a write to them is a segmentation fault."""
    manifest = _header(fd)
    if manifest is None:
        raise ModelError("the weights are not complete")
    # Before Linux 6.7 a sealed memfd can only be mapped shared through a descriptor that cannot write.
    reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    try:
        memory = mmap.mmap(reader, HEADER_BYTES + manifest.size, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(reader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-writable.*")
        flat = torch.frombuffer(memory, dtype=torch.uint8)
    return views(flat[HEADER_BYTES:], manifest), manifest


def _header(fd: int) -> Manifest | None:
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
        return None
    start = os.pread(fd, len(MAGIC) + 8, 0)
    if start[: len(MAGIC)] != MAGIC:
        return None
    size = int.from_bytes(start[len(MAGIC) :], "big")
    return msgspec.msgpack.decode(os.pread(fd, size, len(start)), type=Manifest)


# --- CUDA


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class DeviceWeights:
    """A flat buffer in the device memory of this process, which must outlive every process that attached to it."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str = "cuda", bank_rows: int = 0) -> None:
        for variable in ALLOCATOR_VARIABLES:
            if "expandable_segments:true" in os.environ.get(variable, "").lower():
                raise ModelError(f"{variable}: expandable_segments cannot be shared between processes; turn it off")
        self.manifest = plan(folder, dtype, bank_rows)
        self.flat = torch.zeros(self.manifest.size, dtype=torch.uint8, device=device)
        _load(folder, self.views)
        torch.cuda.synchronize()

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """Each tensor as a view."""
        return views(self.flat, self.manifest)

    @property
    def banks(self) -> dict[str, torch.Tensor]:
        """The room behind each fused group, zero at first."""
        return banks(self.flat, self.manifest)

    def export(self) -> bytes:
        """What another process needs to attach; one export for one consumer, which must not be another thread."""
        return export(self.flat, self.manifest)


def export(flat: torch.Tensor, manifest: Manifest) -> bytes:
    """For `attach_device`."""
    from torch.multiprocessing import reductions

    reduce_tensor: Any = reductions.reduce_tensor
    return pickle.dumps((reduce_tensor(flat), msgspec.msgpack.encode(manifest)))


def attach_device(exported: bytes) -> tuple[dict[str, torch.Tensor], Manifest]:
    """The weights of another process, in its device memory; `exported` comes from this replica's own processes."""
    (rebuild, args), header = pickle.loads(exported)
    manifest = msgspec.msgpack.decode(header, type=Manifest)
    return views(rebuild(*args), manifest), manifest


# --- both


def assemble(model: PreTrainedModel, weights: Views) -> PreTrainedModel:
    """Put the views into a skeleton: tied weights tied, rotary buffers real, nothing to train, eval mode.

    Raises ModelError if a tensor is missing, left over or of another shape.
    """
    try:
        result = model.load_state_dict(dict(weights), strict=False, assign=True)
    except RuntimeError as error:
        raise ModelError(f"weights that do not fit the model's config: {error}") from error
    model.tie_weights()
    if result.unexpected_keys:
        raise ModelError(f"weights that the model does not have: {result.unexpected_keys[:5]}")
    device = next(iter(weights.values())).device
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)
    model.requires_grad_(False)
    left = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if left:
        raise ModelError(f"weights that the files do not have: {left[:5]}")
    model.train(False)
    return model


def digest(weights: Views) -> str:
    """sha256 over names, shapes and bytes of all weights: names the base, and proves that it stayed frozen."""
    sha = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        data = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, data.numel(), HASH_BYTES):
            sha.update(data[start : start + HASH_BYTES].cpu().numpy().data)
    return sha.hexdigest()


def _tensors(model: PreTrainedModel) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _load(folder: Path, into: Views) -> None:
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name in into:
                    into[name].copy_(file.get_tensor(name))


def _files(folder: Path) -> list[Path]:
    """The files that the index names, or the one file: a folder may hold the same weights in other layouts too."""
    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else [SINGLE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} has no safetensors file {missing[0]}")
    return [folder / name for name in names]


def _is_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False))


def _ends_group(name: str) -> tuple[str, int] | None:
    """(the group's bank, its linears), if this is the last weight of a fused group."""
    match = re.fullmatch(r"(model\.layers\.\d+)\.\w+\.(\w+)\.weight", name)
    if match is None or match[2] not in _GROUP_ENDS:
        return None
    group, parts = _GROUP_ENDS[match[2]]
    return f"{match[1]}.{group}", parts


def _position(name: str) -> tuple[int, int, str]:
    match = re.search(r"\.layers\.(\d+)\.", name)
    if match is None:
        return (-1, 0, name)
    kind = next((i for i, part in enumerate(_ORDER) if f".{part}." in name), len(_ORDER))
    # Biases after all weights, so that they do not come between the weights of a fused group.
    return (int(match[1]), kind + (100 if name.endswith("bias") else 0), name)
