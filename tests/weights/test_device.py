"""Weights in device memory, mapped by a second process: same bytes, no second copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from collm_replica import weights
from collm_replica.telemetry import utilisation_of
from tests.support.models import tiny_model_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ATTACH = """
import pathlib, sys, torch
from collm_replica import weights
torch.zeros(1, device="cuda")
before = torch.cuda.mem_get_info()[0]
views, _ = weights.attach_device(pathlib.Path(sys.argv[1]).read_bytes())
digest = weights.digest(views)
print(digest, before - torch.cuda.mem_get_info()[0], flush=True)
"""


def test_another_process_sees_the_same_weights_without_a_copy(tmp_path: Path) -> None:
    """An export that copies 16 GB, or that maps other bytes."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24, "vocab_size": 50_000}
    folder = tiny_model_folder(tmp_path / "model", "llama", **shape)
    owner = weights.DeviceWeights(folder, torch.bfloat16)
    assert owner.manifest.size > 200 << 20
    (tmp_path / "export").write_bytes(owner.export())
    result = subprocess.run([sys.executable, "-c", ATTACH, str(tmp_path / "export")], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    digest, taken = result.stdout.decode().split()
    assert digest == weights.digest(owner.views)
    assert int(taken) < 64 << 20


def test_work_shows_as_utilisation() -> None:
    """A source that says the same for an idle and a busy device."""
    source = utilisation_of("cuda")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    idle = source.read(0.0)
    for _ in range(1000):
        matrix = (matrix @ matrix).clamp(-1, 1)
    torch.cuda.synchronize()
    busy = source.read(1.0)
    assert busy > idle + 0.2
    assert source.memory_bytes() > 100 << 20
