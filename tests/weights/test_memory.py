"""The process that fine-tunes uses the weights that serve: it holds no second copy of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from collm_replica import weights
from tests.support.models import tiny_model_folder

MIB = 1 << 20
TRAIN = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from collm_common.messages import Hyperparams, TrainRound
from collm_common.types import BatchSizes
from collm_replica import weights
from collm_replica.finetune.records import Record
from collm_replica.finetune.samples import build
from collm_replica.finetune.trainer import Trainer
from collm_replica.models import load_tokenizer, skeleton

def anonymous_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024

folder, tokenizer = Path(sys.argv[2]), load_tokenizer(Path(sys.argv[2]))
imported = anonymous_bytes()
views, _ = weights.attach(int(sys.argv[1]))
trainer = Trainer(weights.assemble(skeleton(folder, torch.float32), views), tokenizer)
trainer.data = build([Record((("user", f"{n}?"),), "yes") for n in range(8)], tokenizer, 64, 1)
hyper = Hyperparams(rank=2, alpha=4.0, heldout_samples=1)
trainer.start_round(TrainRound(job="j", round=1, adapter="a", start=0, sizes=BatchSizes(2, 1), steps=2, first_step=0,
                               total_steps=2, hyper=hyper, deadline_s=1e12), None)
while not trainer.done:
    trainer.micro_step()
trainer.evaluate()
moved = any(float(t.abs().sum()) > 0 for name, t in trainer.tensors().items() if "lora_B" in name)
print(json.dumps({"grown_bytes": anonymous_bytes() - imported, "digest": weights.digest(views), "moved": moved}))
"""


def test_training_holds_no_second_copy_and_leaves_every_bit(tmp_path: Path) -> None:
    """Weights that are copied when they are assembled, injected or trained; or changed by it.

    What counts is the private memory gained since before the weights were mapped: imports alone take some 280 MiB, and
    one training step some 80 MiB of activations and scratch space.
    """
    folder = tiny_model_folder(
        tmp_path, "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=9, initializer_range=0.02
    )
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    weights.fill(fd, folder, torch.float32)
    views, manifest = weights.attach(fd)
    assert manifest.size >= 500 * MIB
    before = weights.digest(views)
    command = [sys.executable, "-c", TRAIN, str(fd), str(folder)]
    result = subprocess.run(command, pass_fds=[fd], capture_output=True, check=False)
    os.close(fd)
    assert result.returncode == 0, result.stderr.decode()
    seen = json.loads(result.stdout)
    assert seen["moved"]
    assert seen["digest"] == before
    assert seen["grown_bytes"] < manifest.size / 4, f"{seen['grown_bytes'] / MIB:.0f} MiB"
