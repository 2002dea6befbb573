"""Tokenizers of the served models; they are loaded in threads, and so are long texts encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from msgspec import Struct

from collm_common.errors import InvalidRequest, ModelError
from collm_dispatcher.ingress.body import ChatBody, CompletionBody

SHORT = 4096
A = TypeVar("A")
R = TypeVar("R")


class Prompt(Struct, frozen=True):
    """What a model reads, and the same as text for a client that wants its echo."""

    tokens: tuple[int, ...]
    text: str


class Tokenizing:
    """One tokenizer of a model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def prompts(self, body: ChatBody | CompletionBody) -> list[Prompt]:
        """One a conversation, one or several a completion. Raises InvalidRequest."""
        prompts = await _off_loop(body.size, self._prompts, body)
        size = len(self._tokenizer)
        for prompt in prompts:
            if not prompt.tokens:
                raise InvalidRequest("the prompt has no tokens", param="prompt")
            wrong = next((token for token in prompt.tokens if not 0 <= token < size), None)
            if wrong is not None:
                raise InvalidRequest(f"prompt: token {wrong} is not in the vocabulary", param="prompt")
        return prompts

    async def reference(self, text: str) -> tuple[int, ...]:
        """A reference answer: no leading specials, one EOS at the end."""
        tokens = await _off_loop(len(text), partial(self._encode, specials=False), text)
        eos = self._tokenizer.eos_token_id
        return (*tokens, eos) if eos is not None else tokens

    def token_text(self, token: int) -> str:
        """One token alone, as log-probabilities show it."""
        return str(self._tokenizer.decode([token]))

    def _prompts(self, body: ChatBody | CompletionBody) -> list[Prompt]:
        if isinstance(body, CompletionBody):
            return [self._plain(prompt, bool(body.echo)) for prompt in body.prompts()]
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            text = self._tokenizer.apply_chat_template(body.conversation(), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidRequest(f"messages do not fit the chat template: {error}", param="messages") from error
        return [Prompt(self._encode(text, specials=False), text)]

    def _plain(self, prompt: str | list[int], echo: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(self._encode(prompt, specials=True), prompt)
        known = echo and all(0 <= token < len(self._tokenizer) for token in prompt)
        return Prompt(tuple(prompt), str(self._tokenizer.decode(prompt)) if known else "")

    def _encode(self, text: str, *, specials: bool) -> tuple[int, ...]:
        tokens: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=specials)
        return tuple(tokens)


async def _off_loop(characters: int, work: Callable[[A], R], argument: A) -> R:
    """In a thread if it is long: two changes of thread take longer than a short text does."""
    if characters <= SHORT:
        return work(argument)
    return await asyncio.to_thread(work, argument)


async def load_all(models: Mapping[str, str]) -> dict[str, Tokenizing]:
    """By model name. Raises ModelError that names the one which cannot be loaded."""
    return {name: Tokenizing(await asyncio.to_thread(_load, name, source)) for name, source in models.items()}


def _load(name: str, source: str) -> Any:
    # AutoTokenizer imports torch where it is installed: 5 s and 200 MiB.
    from transformers import PreTrainedTokenizerFast

    if Path(source).is_absolute() and not Path(source).is_dir():
        raise ModelError(f"{name}: {source} is no folder")
    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: no tokenizer at {source}: {error}") from error
    return tokenizer
