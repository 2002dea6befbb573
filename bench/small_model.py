"""A language model small enough for any CPU, taught English by the questions alone; its answers are left to learn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

VOCAB, WIDTH, LAYERS, BLOCK, BATCH, RATE = 2048, 128, 4, 128, 8, 3e-3
EOS = "<|end|>"
_FAST: Any = PreTrainedTokenizerFast


def teach(texts: Sequence[str], steps: int, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Tokenizer and model, kept in `folder` for the next time."""
    if not (folder / "config.json").exists():
        tokenizer = _tokenizer(texts)
        tokenizer.save_pretrained(folder)
        _train(texts, steps, tokenizer).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder), _FAST.from_pretrained(folder)


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerBase:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet)
    )
    made: PreTrainedTokenizerBase = _FAST(tokenizer_object=bpe, eos_token=EOS, pad_token=EOS)
    return made


def _train(texts: Sequence[str], steps: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    model: Any = LlamaForCausalLM(config)
    shuffled = list(texts)
    random.Random(0).shuffle(shuffled)
    tokens = torch.tensor([token for text in shuffled for token in tokenizer(text + EOS)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(steps):
        starts = torch.randint(0, len(tokens) - BLOCK, (BATCH,))
        ids = torch.stack([tokens[start : start + BLOCK] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimizer.step()
        if step % 50 == 0:
            print(f"base model, step {step}: loss {float(loss.detach()):.3f}", flush=True)
    return model  # type: ignore[no-any-return]
