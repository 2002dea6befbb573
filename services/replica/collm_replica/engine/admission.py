"""Which requests an engine can serve at all."""

from __future__ import annotations

from collections.abc import Sequence

from collm_common.errors import InvalidRequest, Overloaded
from collm_common.messages import Request


def check(request: Request, vocabulary: int, context_tokens: int) -> None:
    """Raises InvalidRequest unless prompt with answer, and prompt with reference, fit the context."""
    for name in ("prompt", "prefix", "reference"):
        check_tokens(name, getattr(request, name), vocabulary)
    check_tokens("logit_bias", [token for token, _ in request.sampling.logit_bias], vocabulary)
    check_tokens("stop_token_ids", request.sampling.stop_tokens, vocabulary)
    prompt = len(request.prompt)
    if not prompt:
        raise InvalidRequest("prompt has no tokens", param="prompt")
    _check_length("max_tokens", prompt, request.sampling.max_tokens, context_tokens)
    _check_length("prefix", prompt, len(request.prefix), context_tokens)
    _check_length("reference", prompt, len(request.reference), context_tokens)


def check_score(prompt: Sequence[int], reference: Sequence[int], vocabulary: int, context_tokens: int) -> None:
    """Raises InvalidRequest unless both have tokens and fit the context."""
    for name, tokens in (("prompt", prompt), ("reference", reference)):
        check_tokens(name, tokens, vocabulary)
        if not tokens:
            raise InvalidRequest(f"{name} has no tokens", param=name)
    _check_length("reference", len(prompt), len(reference), context_tokens)


def check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raises InvalidRequest for a token outside the vocabulary."""
    wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise InvalidRequest(f"{name}: token {wrong} is not in 0..{vocabulary - 1}", param=name)


def check_room(waiting: int, max_waiting: int) -> None:
    """Raises Overloaded if as many requests wait as may."""
    if waiting >= max_waiting:
        raise Overloaded(f"{waiting} requests wait, the limit is {max_waiting}", retry_after_s=1.0)


def _check_length(name: str, prompt: int, more: int, context_tokens: int) -> None:
    if prompt + more > context_tokens:
        raise InvalidRequest(
            f"prompt has {prompt} tokens and {name} {more}, together more than the context of {context_tokens}",
            param=name,
            code="context_length_exceeded",
        )
