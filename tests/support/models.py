"""Tiny random models of the served families, saved as ordinary Hugging Face folders, and adapters in PEFT's form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
EOS_ID, PAD_ID, VOCAB = 256 + SPECIALS.index("<|im_end|>"), 256 + SPECIALS.index("<|pad|>"), 256 + len(SPECIALS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_AUTO_MODEL: Any = AutoModelForCausalLM
_FAST_TOKENIZER: Any = PreTrainedTokenizerFast
_CONFIGS: dict[str, type[Any]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (its rank in the byte-level alphabet), then SPECIALS; `<|im_end|>` is the EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: rank for rank, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # in words, as real ones: each is cached
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in SPECIALS])
    wrapped: PreTrainedTokenizerFast = _FAST_TOKENIZER(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_model_folder(path: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random float32 model of `family` with `byte_tokenizer` at `path`; `overrides` are config fields."""
    config = _CONFIGS[family](**(_SHAPE | ({"head_dim": 16} if family == "qwen3" else {}) | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _AUTO_MODEL.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return Path(path)


def random_adapter(
    model_folder: Path, rank: int, alpha: float, modules: Sequence[str] = LINEARS, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random LoRA tensors of every linear named in `modules`, in PEFT's saved names; B is not zero, so they matter.

    B is drawn so that the update alpha / rank * B A is about as large as the base weights.
    """
    with torch.device("meta"):
        model = _AUTO_MODEL.from_config(AutoConfig.from_pretrained(model_folder))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if re.search(rf"\.({'|'.join(modules)})$", name) and isinstance(module, torch.nn.Linear):
            prefix = f"base_model.model.{name}"
            std_a = module.in_features**-0.5
            a = torch.randn(rank, module.in_features, generator=generator) * std_a
            b = torch.randn(module.out_features, rank, generator=generator) * (rank**0.5 / alpha)
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = b
    return tensors
