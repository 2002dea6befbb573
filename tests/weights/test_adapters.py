"""Adapter bytes: what is stored comes back, what does not fit is refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from collm_common.errors import AdapterError
from collm_common.types import AdapterManifest
from collm_replica import adapters
from tests.support.models import LINEARS, random_adapter, tiny_model_folder


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    return random_adapter(tiny_model_folder(tmp_path / "model", "llama"), rank=4, alpha=8.0)


def about(data: bytes, tensors: dict[str, torch.Tensor]) -> AdapterManifest:
    return adapters.manifest(data, tensors, name="desk", version=3, base_digest="abc", alpha=8.0, parent=2)


def test_tensors_come_back_rounded_to_bf16(tensors: dict[str, torch.Tensor]) -> None:
    """An adapter that changes on its way, or a manifest that does not describe it."""
    data = adapters.encode(tensors)
    manifest = about(data, tensors)
    assert (manifest.rank, set(manifest.modules), manifest.parent) == (4, set(LINEARS), 2)
    back = adapters.decode(data, manifest)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name].bfloat16().float()) for name in tensors)
    assert adapters.encode(back) == data


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sha256": "0" * 64}, "sha256"),
        ({"rank": 2}, "rank 2"),
        ({"modules": ("q_proj",)}, "modules"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    tensors: dict[str, torch.Tensor], change: dict[str, object], named: str
) -> None:
    """An adapter of another shape that reaches the engine's loop."""
    data = adapters.encode(tensors)
    with pytest.raises(AdapterError, match=named):
        adapters.decode(data, msgspec.structs.replace(about(data, tensors), **change))


def test_values_that_are_not_finite_are_refused_by_tensor(tensors: dict[str, torch.Tensor]) -> None:
    """A diverged training run that is served."""
    name = next(iter(tensors))
    tensors[name][0, 0] = float("nan")
    data = adapters.encode(tensors)
    with pytest.raises(AdapterError, match=name.replace(".", r"\.")):
        adapters.decode(data, about(data, tensors))


def test_a_factor_without_its_partner_is_refused_by_layer(tensors: dict[str, torch.Tensor]) -> None:
    """Half an adapter, or one whose product does not exist, that fails in the middle of a step."""
    name = next(name for name in tensors if ".lora_B." in name)
    layer = name.split(".lora_")[0].replace(".", r"\.")
    for left in (
        {key: tensor for key, tensor in tensors.items() if key != name},
        tensors | {name: tensors[name][:, :2]},
        tensors | {name.replace("lora_B.weight", "lora_B.bias"): tensors[name]},
    ):
        data = adapters.encode(left)
        with pytest.raises(AdapterError, match=layer):
            adapters.decode(data, about(data, left))


def test_bytes_that_are_no_safetensors_are_refused(tensors: dict[str, torch.Tensor]) -> None:
    """A foreign exception out of a parser."""
    with pytest.raises(AdapterError, match="desk@v3"):
        adapters.decode(b"junk", about(b"junk", tensors))


def test_a_file_for_the_other_process_is_whole(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """A snapshot that is read while it is written."""
    path = tmp_path / "snapshot.safetensors"
    adapters.write_file(path, tensors)
    assert list(tmp_path.glob("*.partial")) == []
    back = adapters.read_file(path)
    assert all(torch.equal(back[name], tensors[name].bfloat16().float()) for name in tensors)
