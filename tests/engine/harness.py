"""Running engines to their end and asking Hugging Face and PEFT the same."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

from collm_common.messages import Delta, Done, Failed, Request, TokenLogprob
from collm_common.types import AdapterRef, SamplingParams, Slo
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.core import EngineCore
from collm_replica.engine.engine import Engine

CONFIG = EngineConfig(
    max_batch=8, block_tokens=4, kv_bytes=2**24, step_tokens=64, slots=3, max_rank=8, context_tokens=128, max_waiting=64
)


@dataclass
class Answer:
    """What an engine said about one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    adapters: set[AdapterRef | None] = field(default_factory=set)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None
    failed: Failed | None = None

    def take(self, reply: Delta | Done | Failed) -> None:
        match reply:
            case Delta():
                self.tokens += reply.tokens
                self.text += reply.text
                self.finish = reply.finish
                self.adapters.add(reply.adapter)
                self.offsets.append(reply.offset)
                self.logprobs += reply.logprobs
                self.prompt_logprobs += reply.prompt_logprobs
            case Done():
                self.done = reply
            case Failed():
                self.failed = reply


def request(name: str, prompt: Sequence[int], max_tokens: int = 12, **fields: Any) -> Request:
    """A greedy request that ignores EOS; SamplingParams fields are taken out of `fields`."""
    names = SamplingParams.__struct_fields__
    sampling = {"ignore_eos": True, **{key: fields.pop(key) for key in list(fields) if key in names}}
    return Request(
        id=name,
        ingress="ingress",
        model="tiny",
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        slo=Slo("any"),
        arrival_s=0.0,
        **{"deadline_s": 1.0, **fields},
    )


def drain(engine: EngineCore, answers: dict[str, Answer] | None = None, steps: int = 2000) -> dict[str, Answer]:
    """Step until there is no work, or at most `steps` times."""
    answers = defaultdict(Answer) if answers is None else answers
    while engine.has_work and steps > 0:
        steps -= 1
        for reply in engine.step().replies:
            answers[reply.id].take(reply)
    return answers


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).train(False)


def make_engine(folder: Path, config: EngineConfig = CONFIG) -> Engine:
    return Engine(load(folder), AutoTokenizer.from_pretrained(folder), config)


def publish(engine: EngineCore, ref: AdapterRef, tensors: dict[str, torch.Tensor], rank: int, alpha: float) -> None:
    assert engine.load_adapter(engine.stage(ref, tensors, rank, alpha))
    engine.publish(ref)


def with_adapter(folder: Path, tensors: dict[str, torch.Tensor], rank: int, alpha: float) -> Any:
    """The model under PEFT with these tensors."""
    modules = sorted({name.split(".")[-3] for name in tensors})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT still reads an attribute that transformers renamed
        model = get_peft_model(load(folder), LoraConfig(r=rank, lora_alpha=int(alpha), target_modules=modules))
    outcome: Any = set_peft_model_state_dict(model, tensors)
    assert not outcome.unexpected_keys
    return model.eval()


@torch.inference_mode()
def generate(model: Any, prompt: Sequence[int], max_tokens: int = 12) -> list[int]:
    """Greedy tokens of Hugging Face `generate`, EOS ignored."""
    out = model.generate(
        input_ids=torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def loss(model: Any, prompt: Sequence[int], reference: Sequence[int]) -> float:
    """Hugging Face loss of the reference tokens only."""
    ids = torch.tensor([[*prompt, *reference]])
    labels = torch.tensor([[-100] * len(prompt) + list(reference)])
    return float(model(input_ids=ids, labels=labels).loss)
