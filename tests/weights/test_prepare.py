"""A model made ready for others to serve under one fixed path."""

from __future__ import annotations

from pathlib import Path

import pytest

from collm_common.errors import ModelError
from collm_replica.prepare import prepare


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


def test_the_link_names_the_model_and_follows_a_change(tmp_path: Path) -> None:
    """A second model that is made ready while the first one goes on being served."""
    first, second = _model(tmp_path / "first"), _model(tmp_path / "second")
    assert prepare(str(first), tmp_path).readlink() == first
    assert prepare(str(second), tmp_path).resolve() == second
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second", "served"]


def test_a_folder_that_names_no_model_is_refused(tmp_path: Path) -> None:
    """Replicas that start on nothing because the step before them called it done."""
    with pytest.raises(ModelError, match="0 GGUF files"):
        prepare(str(tmp_path), tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match="2 GGUF files"):
        prepare(str(tmp_path), tmp_path)
