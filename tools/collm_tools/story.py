"""Lines that a person reads."""

from __future__ import annotations

from rich.console import Console


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print `text` as it stands: brackets are no markup, and no line is broken, so that commands can be copied."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
