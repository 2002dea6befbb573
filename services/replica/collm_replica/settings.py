"""Settings of one replica (COLLM_REPLICA_*), read by the supervisor and both of its children."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from collm_common.settings import Common
from collm_common.types import AtLeastOne, Count, Name, Positive, Rank, Share


class ReplicaSettings(Common, frozen=True, kw_only=True):
    """`model` is a local Hugging Face folder, a hub name or a GGUF file; `served_name` what clients call it.

    `mps` starts NVIDIA's Multi-Process Service for this replica's processes, if it can be had.
    `sm_shares` are the shares of the GPU's SMs that fine-tuning may be given (needs MPS); none leaves it as it is.
    `train_mb` is the most memory of a GPU that fine-tuning takes (MiB); 0 is half of what is free when it starts.
    `prefix_cache` keeps the keys and values of prompts and answers for requests that begin with the same tokens.
    `fused` runs decode steps as CUDA graphs of fused kernels, one step ahead of the host; where there is a GPU.
    An engine without progress is reported unhealthy after `unhealthy_s` seconds and replaced after `stall_s`.
    """

    id: Name
    model: str
    served_name: Name
    cache_dir: str = ".cache/models"
    data_dir: str = "data"
    run_dir: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    engine: Literal["torch", "fake"] = "torch"
    fake_step_s: Annotated[float, Meta(ge=0)] = 0.01

    max_batch: AtLeastOne = 8
    max_waiting: AtLeastOne = 64
    context_tokens: AtLeastOne = 1024
    block_tokens: AtLeastOne = 16
    kv_mb: AtLeastOne = 256
    step_tokens: AtLeastOne = 256
    slots: AtLeastOne = 4
    max_rank: AtLeastOne = 16
    train_rank: Rank = 1024
    threads: AtLeastOne = 1
    prefix_cache: bool = True
    fused: bool = True
    sm_shares: tuple[Share, ...] = ()
    mps: bool = False
    train_mb: Count = 0
    finetune_nice: Annotated[int, Meta(ge=0, le=19)] = 10

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    advertise_host: str = ""
    max_upload_mb: AtLeastOne = 64

    report_s: Positive = 1.0
    lease_ttl_s: Positive = 5.0
    start_timeout_s: Positive = 600.0
    unhealthy_s: Positive = 30.0
    stall_s: Positive = 120.0
    drain_s: Positive = 30.0
    restart_limit: Count = 10
    restart_backoff_s: Positive = 0.5

    @property
    def snapshots(self) -> Path:
        """Where one child leaves adapter snapshots for the other: under `run_dir`, or the system's temporary folder."""
        return Path(self.run_dir or tempfile.gettempdir()) / f"collm-{self.id.replace('/', '_')}-snapshots"
