"""Tiny model folders, made once; one torch thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model_folder

torch.set_num_threads(1)

Folders = Callable[..., Path]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """`folders(family, **overrides)`: the folder of a tiny model, the same for the same arguments."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = tiny_model_folder(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make
