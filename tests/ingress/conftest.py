"""A tiny tokenizer on disk, once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, with a chat template."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return folder
