"""Launcher and coordinator while their broker is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from collm_launcher.service import Launcher
from tests.launcher.support import running, settings
from tests.support.broker import Broker
from tests.support.waiting import eventually


@pytest.fixture
def own_broker() -> Iterator[Broker]:
    """A server that this test may stop."""
    server = Broker()
    server.start()
    yield server
    server.close()


async def test_both_lead_again_after_the_broker_was_away(own_broker: Broker) -> None:
    """A restart of the broker that ends the services which outlive it."""
    async with connection(own_broker.url) as redis:
        launcher = Launcher(settings(lease_ttl_s=0.6), redis, SystemClock())
        coordinator = Coordinator(CoordinatorSettings(lease_ttl_s=0.6), redis, SystemClock())
        async with running(launcher, coordinator):
            await eventually(lambda: launcher.leads and coordinator.leads)
            own_broker.stop()
            await eventually(lambda: not launcher.leads and not coordinator.leads)
            own_broker.start()
            await eventually(lambda: launcher.leads and coordinator.leads)
