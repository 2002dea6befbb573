"""The real engine: a Hugging Face model behind `EngineCore`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collm_replica.engine.backend import TorchBackend
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.core import EngineCore
from collm_replica.engine.decoder import Banks
from collm_replica.engine.grammar import guides


class Engine(EngineCore):
    """Serves `model` in place: its weights may be moved next to one another, its modules are not run."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        banks: Banks | None = None,
    ) -> None:
        """`banks`: room behind the weights for the slots. Raises ModelError if `config` is too small for the model."""
        backend = TorchBackend(model, config, banks)

        def decode(tokens: Sequence[int]) -> str:
            return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

        eos = end_tokens(model, tokenizer)
        vocabulary = model.config.vocab_size
        guided = guides(tokenizer, vocabulary, eos)
        super().__init__(backend, decode, eos, vocabulary, backend.blocks, config, clock, guided)


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every token that ends an answer, by the model's configurations or the tokenizer."""
    ends: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for value in (
        getattr(generation, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ):
        ends.update(value if isinstance(value, list) else [] if value is None else [int(value)])
    return frozenset(ends)
