"""Work of the inference process, told from the trainer's."""

from __future__ import annotations

import pytest

from collm_replica.telemetry import CpuUtilisation, OwnWork


class Device(CpuUtilisation):
    """A device whose counter sees all processes."""

    def __init__(self) -> None:
        self.value = 0.0

    def read(self, busy_fraction: float) -> float:
        """What it was set to."""
        return self.value


def test_a_trainer_beside_is_no_work_of_the_engine() -> None:
    """A replica that trains and serves nobody, called busy: it would be asked for nothing and never fall idle."""
    device = Device()
    own = OwnWork(device)
    device.value = 0.3
    for _ in range(30):
        assert own.read(0.5, beside_training=False) == 0.3
    device.value = 0.9
    assert own.read(0.2, beside_training=True) == pytest.approx(0.12, rel=0.01)
    assert own.read(0.0, beside_training=True) == 0.0


def test_beside_training_no_more_work_is_claimed_than_the_device_did() -> None:
    """A busy fraction that waits for the trainer, taken for work."""
    device = Device()
    device.value = 0.4
    assert OwnWork(device).read(0.9, beside_training=True) == 0.4


def test_the_work_of_others_on_the_device_is_not_claimed() -> None:
    """Three replicas on one GPU of which none falls idle, because one of them is busy."""
    device = Device()
    own = OwnWork(device)
    device.value = 0.6
    assert own.read(0.0, beside_training=False) == 0.0
    assert own.read(0.1, beside_training=False) == 0.1
