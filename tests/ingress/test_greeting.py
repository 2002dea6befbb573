"""The line that tells an operator what to try first."""

from __future__ import annotations

import logging

import pytest

from collm_common.clock import ManualClock
from collm_dispatcher.ingress.greeting import greet


async def test_the_first_request_is_told_once_it_can_be_answered(caplog: pytest.LogCaptureFixture) -> None:
    """An operator who pastes a command that answers 503, or that never comes."""
    asked = iter([False, False, True])
    with caplog.at_level(logging.INFO):
        await greet(lambda: next(asked), "http://here:80", "m", ManualClock())
    assert next(asked, None) is None
    assert "curl -N http://here:80/v1/chat/completions" in caplog.text
    assert '"model": "m"' in caplog.text
