"""From settings to an engine over the shared weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from collm_replica import adapters, weights
from collm_replica.engine.engine import Engine
from collm_replica.finetune.trainer import Trainer
from collm_replica.inference import Loadout, engine_config
from collm_replica.models import load_tokenizer, resolve, skeleton
from collm_replica.settings import ReplicaSettings
from collm_replica.telemetry import utilisation_of


def device_of(settings: ReplicaSettings) -> str:
    """`cuda` or `cpu`."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_of(settings: ReplicaSettings) -> torch.dtype:
    """bfloat16 on a GPU and float32 on a CPU, unless set."""
    name = settings.dtype
    if name == "auto":
        name = "bfloat16" if device_of(settings) == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def prepare_training(settings: ReplicaSettings, weights_fd: int, exported: bytes) -> tuple[Trainer, str]:
    """A trainer on the weights that the inference process serves (`exported`: device memory), and their digest."""
    torch.set_num_threads(settings.threads)
    folder = resolve(settings.model, settings.cache_dir)
    views, manifest = weights.attach_device(exported) if exported else weights.attach(weights_fd)
    if exported:
        cap_memory(settings.train_mb << 20)
    model = weights.assemble(skeleton(folder, manifest.torch_dtype), views)
    return Trainer(model, load_tokenizer(folder)), weights.digest(views)


def cap_memory(limit_bytes: int) -> None:
    """What this process takes beyond it fails here, never in the process that serves. 0: half of what is free now."""
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit_bytes or free // 2) / total))


def blank_adapter(model: Any) -> dict[str, torch.Tensor]:
    """Of rank 1 on one linear, all zeros."""
    linear = model.model.layers[0].self_attn.q_proj
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    shapes = {"A": (1, linear.in_features), "B": (linear.out_features, 1)}
    return {f"{name}{side}.weight": torch.zeros(shape) for side, shape in shapes.items()}


def load_model(settings: ReplicaSettings, weights_fd: int) -> Loadout:
    """Fill the shared buffer if it is empty, and build the engine on it. Raises ModelError."""
    torch.set_num_threads(settings.threads)
    folder, dtype, device = resolve(settings.model, settings.cache_dir), dtype_of(settings), device_of(settings)
    if device == "cpu":
        weights.fill(weights_fd, folder, dtype)
        views, _ = weights.attach(weights_fd)
        banks, export = None, None
    else:
        rows = settings.slots * settings.max_rank
        owner = weights.DeviceWeights(folder, dtype, bank_rows=rows if settings.fused else 0)
        views, banks, export = owner.views, owner.banks, owner.export
    model = weights.assemble(skeleton(folder, dtype), views)
    config = replace(engine_config(settings), fused=settings.fused, run_ahead=settings.fused and device == "cuda")
    engine = Engine(model, load_tokenizer(folder), config, banks=banks)
    return Loadout(
        engine=engine,
        utilisation=utilisation_of(device),
        digest=lambda: weights.digest(views),
        export=export,
        decode=adapters.decode,
        read_file=adapters.read_file,
        warm_up_tokens=3 if export is None else min(config.context_tokens - 2, config.step_tokens),
        blank=blank_adapter(model) if export is not None and config.slots else {},
    )
