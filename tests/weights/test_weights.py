"""The flat buffer: right values, right neighbours, sealed, and found complete or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from collm_common.errors import ModelError
from collm_replica import weights
from collm_replica.models import resolve, skeleton
from tests.support.models import FAMILIES, tiny_model_folder


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield made
    os.close(made)


def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_the_buffer_computes_what_the_ordinary_one_does(
    family: str, tied: bool, fd: int, tmp_path: Path
) -> None:
    """A weight at a wrong offset, a tied head left on meta, or rotary buffers that were never made."""
    folder = tiny_model_folder(tmp_path, family, tie_word_embeddings=tied)
    weights.fill(fd, folder, torch.float32)
    views, _ = weights.attach(fd)
    model = weights.assemble(skeleton(folder, torch.float32), views)
    ids = torch.randint(0, 200, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, reference(folder)(input_ids=ids).logits)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tied


def test_fused_groups_are_neighbours(tmp_path: Path) -> None:
    """A fused matrix product that would read padding between q, k and v."""
    manifest = weights.plan(tiny_model_folder(tmp_path, "qwen2"), torch.bfloat16)
    for layer in range(2):
        for group in (("q", "k", "v"), ("gate", "up")):
            names = [name for name in manifest.places if f"layers.{layer}." in name and name.endswith("proj.weight")]
            places = [manifest.places[next(n for n in names if f".{part}_proj." in n)] for part in group]
            ends = [place.offset + place.shape[0] * place.shape[1] * 2 for place in places]
            assert [place.offset for place in places[1:]] == ends[:-1]
    assert all(place.offset % 2 == 0 for place in manifest.places.values())


def test_a_sealed_buffer_takes_no_write_from_anyone(fd: int, tmp_path: Path) -> None:
    """Base weights that any process could change, its owner included."""
    weights.fill(fd, tiny_model_folder(tmp_path, "llama"), torch.float32)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", weights.HEADER_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)


def test_a_write_to_mapped_weights_is_a_segmentation_fault(fd: int, tmp_path: Path) -> None:
    """A trainer that changes the weights that serve."""
    weights.fill(fd, tiny_model_folder(tmp_path, "llama"), torch.float32)
    code = "import sys; from collm_replica import weights; v, _ = weights.attach(int(sys.argv[1]))\n"
    code += "t = next(iter(v.values())); print(float(t.sum()), flush=True); t.add_(1); print('wrote')"
    result = subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], capture_output=True, check=False)
    assert result.returncode == -signal.SIGSEGV, result.stderr.decode()
    assert b"wrote" not in result.stdout
    assert result.stdout


def test_a_half_filled_buffer_is_filled_again(fd: int, tmp_path: Path) -> None:
    """Weights of zeros served because a process was killed while it loaded them."""
    folder = tiny_model_folder(tmp_path, "llama")
    os.ftruncate(fd, weights.HEADER_BYTES + 100)
    with pytest.raises(ModelError, match="not complete"):
        weights.attach(fd)
    weights.fill(fd, folder, torch.float32)
    before = weights.digest(weights.attach(fd)[0])
    (folder / "model.safetensors").unlink()
    weights.fill(fd, folder, torch.float32)
    assert weights.digest(weights.attach(fd)[0]) == before


def test_a_buffer_that_was_never_sealed_is_filled_again(
    fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay writable for ever because a process was killed just before it sealed them."""
    folder = tiny_model_folder(tmp_path, "llama")
    with monkeypatch.context() as patch:
        patch.setattr(weights, "SEALS", 0)
        weights.fill(fd, folder, torch.float32)
    with pytest.raises(ModelError, match="not complete"):
        weights.attach(fd)
    weights.fill(fd, folder, torch.float32)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", weights.HEADER_BYTES)


def test_a_complete_buffer_of_another_dtype_is_refused(fd: int, tmp_path: Path) -> None:
    """A restart with another dtype that goes on with the old weights."""
    folder = tiny_model_folder(tmp_path, "llama")
    weights.fill(fd, folder, torch.float32)
    with pytest.raises(ModelError, match=r"float32, not torch\.bfloat16"):
        weights.fill(fd, folder, torch.bfloat16)


def test_tensors_that_follow_from_others_are_not_stored(fd: int, tmp_path: Path) -> None:
    """A tied head that is stored twice, or an older file refused for the rotary buffer that it still carries."""
    folder = tiny_model_folder(tmp_path, "llama", tie_word_embeddings=True)
    plain, path = weights.plan(folder, torch.float32), folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path)
    assert weights.plan(folder, torch.float32) == plain
    weights.fill(fd, folder, torch.float32)
    weights.assemble(skeleton(folder, torch.float32), weights.attach(fd)[0])


def test_a_folder_with_another_copy_of_the_weights_is_read_once(fd: int, tmp_path: Path) -> None:
    """Sharded files, beside which a publisher's own format lies under names that no module has."""
    folder = tiny_model_folder(tmp_path / "one", "mistral")
    plain = weights.plan(folder, torch.float32)
    model = reference(folder)
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    save_file({"layers.0.attention.wq.weight": torch.ones(8, 8)}, tmp_path / "many" / "consolidated.safetensors")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
    assert weights.plan(tmp_path / "many", torch.float32) == plain
    weights.fill(fd, tmp_path / "many", torch.float32)
    assert weights.digest(weights.attach(fd)[0]) == weights.digest(model.state_dict())


def test_device_memory_that_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that dies while it attaches, long after the setting that caused it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ModelError, match="PYTORCH_CUDA_ALLOC_CONF"):
        weights.DeviceWeights(tmp_path, torch.float32)


def test_the_digest_names_the_weights(tmp_path: Path) -> None:
    """Two bases that count as one, or one that counts as two."""
    digests: list[str] = []
    for seed in (0, 0, 1):
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        weights.fill(fd, tiny_model_folder(tmp_path / str(len(digests)), "llama", seed=seed), torch.float32)
        digests.append(weights.digest(weights.attach(fd)[0]))
        os.close(fd)
    assert digests[0] == digests[1] != digests[2]


def test_a_missing_weight_is_named(fd: int, tmp_path: Path) -> None:
    """A model that serves random numbers for a tensor its files do not have."""
    folder = tiny_model_folder(tmp_path, "llama")
    weights.fill(fd, folder, torch.float32)
    views, _ = weights.attach(fd)
    del views["model.norm.weight"]
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        weights.assemble(skeleton(folder, torch.float32), views)
    with pytest.raises(ModelError, match=r"other\.weight"):
        weights.assemble(skeleton(folder, torch.float32), {**views, "other.weight": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        weights.assemble(skeleton(folder, torch.float32), {**views, "model.norm.weight": torch.zeros(3)})


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    """A start that fails deep inside a library, with no word about the model."""
    (tmp_path / "file.bin").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    for name, why in (
        ("file.bin", "neither a folder nor"),
        ("nowhere", "does not exist"),
        ("none.gguf", "does not exist"),
        ("empty", r"config\.json"),
        ("other", "GPT2LMHeadModel is not served"),
    ):
        with pytest.raises(ModelError, match=why):
            resolve(str(tmp_path / name), str(tmp_path))
    with pytest.raises(ModelError, match="hub"):
        resolve("nobody/nothing-at-all", str(tmp_path))
    folder = tiny_model_folder(tmp_path / "model", "llama")
    assert resolve(str(folder), str(tmp_path)) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors"):
        weights.plan(folder, torch.float32)
