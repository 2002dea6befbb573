"""Stop strings in streamed text."""

from __future__ import annotations


class StopFinder:
    """Lets text through up to the first stop string and holds back an end that may be the beginning of one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown now; the stop string and what follows it never is."""
        if self.found or not text:
            return ""
        text = self._held + text
        cuts = [cut for cut in (text.find(stop) for stop in self._stops) if cut >= 0]
        if cuts:
            self.found, self._held = True, ""
            return text[: min(cuts)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is held back, for there will be no more text."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
