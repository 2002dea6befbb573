"""GGUF files: refused by name before they are converted, converted once otherwise."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest

from collm_common.errors import ModelError
from collm_replica.models import resolve


def test_an_unsupported_architecture_is_refused_before_conversion(tmp_path: Path) -> None:
    """Minutes of conversion for a model that is refused afterwards, and its copy left in the cache."""
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="GPT2LMHeadModel is not served"):
        resolve(str(path), str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    """A broken download that fails deep inside a parser."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        resolve(str(path), str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_converted_file_is_taken_from_the_cache_until_it_changes(tmp_path: Path) -> None:
    """A conversion at every start, or an old model served after its file was replaced."""
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    path.write_bytes(b"first")
    status = path.stat()
    folder = cache / f"model-{status.st_size}-{status.st_mtime_ns}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert resolve(str(path), str(cache)) == folder
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ModelError, match=r"model\.gguf"):
        resolve(str(path), str(cache))
