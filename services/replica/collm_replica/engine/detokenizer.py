"""Incremental detokenising."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_HALF_CHARACTER_TOKENS = 3
"""A UTF-8 character has at most 4 bytes, so half a one spans at most 3 tokens."""
_PENDING_TOKENS = 8
"""Tokens without certain text that are kept before they are looked at more closely."""


class Detokenizer:
    """Turns tokens into text piece by piece; never gives out half a UTF-8 character.

    Tokens are decoded together with those shown last, because how a token reads depends on what stands before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def push(self, token: int) -> str:
        """The text that `token` completes, "" if its last character is not complete."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        crowded = len(self._tokens) - self._shown > _PENDING_TOKENS
        if text.endswith(_UNFINISHED):
            return self._show_invalid(text) if crowded else ""
        if len(text) > len(self._shown_text) or crowded:
            return self._show(text, len(self._tokens))
        return ""

    def flush(self) -> str:
        """The rest, complete or not."""
        return self._show(self._decode(self._tokens), len(self._tokens))

    def _show_invalid(self, text: str) -> str:
        """Bytes that will never be a character are shown, up to a cut that lies between two characters."""
        last = len(self._tokens) - _HALF_CHARACTER_TOKENS
        for cut in range(last, last - _HALF_CHARACTER_TOKENS - 1, -1):
            head = self._decode(self._tokens[:cut])
            if head + self._decode(self._tokens[cut:]) == text:
                return self._show(head, cut)
        return ""

    def _show(self, text: str, count: int) -> str:
        """Give out `text`, which reads the first `count` tokens, less what of it was shown before."""
        new = text[len(self._shown_text) :]
        del self._tokens[: self._shown]
        self._shown = count - self._shown
        self._shown_text = self._decode(self._tokens[: self._shown])
        return new
