"""The line that tells an operator what to try first."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from collm_common.clock import Clock, ticks

log = logging.getLogger(__name__)
LOOK_S = 0.5


def first_request(url: str, model: str) -> str:
    """A command to paste into a shell."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{json.dumps(body)}'"


async def greet(ready: Callable[[], bool], url: str, model: str, clock: Clock) -> None:
    """Log it once, as soon as it can be answered."""
    async for _ in ticks(LOOK_S, clock):
        if ready():
            log.info("ready to answer; try\n  %s", first_request(url, model))
            return
