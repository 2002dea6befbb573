"""Answers that follow a JSON schema: which tokens may come next. Computed by llguidance, where it is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from collm_common.errors import InternalError, InvalidRequest
from collm_replica.engine.guide import PARAM, Guide, Guides, unguided

_WHITESPACE: Any = {"whitespace_pattern": r"\n? {0,8}"}
"""Room to indent, but no model can fill its answer with blanks."""


class _Matcher(Protocol):
    def compute_bitmask(self) -> bytes: ...

    def consume_token(self, token: int) -> bool: ...

    def get_error(self) -> str: ...


class JsonGuide:
    """One answer's place in its schema."""

    def __init__(self, matcher: _Matcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        return self._matcher.compute_bitmask()

    def push(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise InternalError(f"token {token} does not follow the schema: {self._matcher.get_error()[:200]}")


def guides(tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: Iterable[int]) -> Guides:
    """For answers of this tokenizer that end with one of `ends`; `unguided` without llguidance or an end."""
    try:
        import llguidance
        import llguidance.hf
    except ImportError:
        return unguided
    eos = sorted(ends)
    if not eos:
        return unguided
    # transformers is untyped here, and llguidance asks for the subclass of fast tokenizers.
    fast: Any = tokenizer
    try:
        known = llguidance.hf.from_tokenizer(fast, n_vocab=vocabulary, eos_token=eos)
    except ValueError:
        return unguided

    def guide(schema: str) -> Guide:
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_WHITESPACE)
        except ValueError as error:
            raise InvalidRequest(f"{PARAM}: {error}", param=PARAM) from error
        matcher = llguidance.LLMatcher(known, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"{PARAM}: {matcher.get_error()[:500]}", param=PARAM)
        return JsonGuide(matcher)

    return guide
