"""An engine on random weights in the shapes of Llama-3.1-8B: what the benches on a GPU share."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collm_common.messages import Delta, Request
from collm_common.types import AdapterRef, SamplingParams, Slo
from collm_replica import weights
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.engine import Engine
from collm_replica.models import skeleton
from tests.support.models import byte_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, RANK, CONTEXT = 4, 16, 320
ADAPTER = AdapterRef("a", "1")
Result = dict[str, Any]


def model_folder(path: Path, layers: int) -> Path:
    """A folder with a config and no weights."""
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    return path


class Owner:
    """Random weights in one flat buffer, with room for slots behind them, as the inference process has them."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        model: Any = skeleton(folder, torch.bfloat16)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        self.manifest = weights.layout(shapes, torch.bfloat16, SLOTS * RANK)
        self.flat = torch.zeros(self.manifest.size, dtype=torch.uint8, device=DEVICE)
        self.banks = weights.banks(self.flat, self.manifest)
        views = weights.views(self.flat, self.manifest)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for tensor in views.values():
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(1.0)
        self.model = weights.assemble(model, views)

    def export(self) -> bytes:
        """For the trainer."""
        return weights.export(self.flat, self.manifest)


def adapter_tensors(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA of every linear, as PEFT saves it."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            a = torch.randn(RANK, module.in_features, generator=generator, device=DEVICE) * module.in_features**-0.5
            b = torch.randn(module.out_features, RANK, generator=generator, device=DEVICE) * 0.02
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return tensors


def engine_on(owner: Owner, **config: Any) -> Engine:
    """With one adapter published, in the last slot."""
    bounds: dict[str, Any] = {
        "max_batch": 256,
        "kv_bytes": 48 << 30,
        "step_tokens": 16384,
        "slots": SLOTS,
        "max_rank": RANK,
        "context_tokens": 8704,
        "max_waiting": 1024,
        "fused": True,
        "run_ahead": True,
    }
    engine = Engine(owner.model, byte_tokenizer(), EngineConfig(**bounds | config), banks=owner.banks)
    engine.load_adapter(engine.stage(ADAPTER, adapter_tensors(owner.model, 1), RANK, 2.0 * RANK))
    engine.publish(ADAPTER)
    return engine


def request(name: str, prompt: Sequence[int], max_tokens: int, adapter: bool) -> Request:
    """Greedy, to its full length."""
    return Request(
        id=name,
        ingress="bench",
        model="bench",
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        slo=Slo("bench"),
        arrival_s=0.0,
        deadline_s=1.0,
        adapter=ADAPTER.name if adapter else "",
    )


def prompt_of(length: int, seed: int, vocabulary: int = 256) -> list[int]:
    """Random tokens."""
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(engine: Engine) -> dict[str, list[int]]:
    """Step until nothing is left; each request's tokens."""
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for reply in engine.step().replies:
            if isinstance(reply, Delta):
                answers.setdefault(reply.id, []).extend(reply.tokens)
    return answers


def quantiles(values: Sequence[float]) -> Result:
    """Median, 95th and 99th percentile, largest."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in (("p95", 0.95), ("p99", 0.99))}
    return {"median": statistics.median(ordered), **at, "max": ordered[-1], "n": len(ordered)}
