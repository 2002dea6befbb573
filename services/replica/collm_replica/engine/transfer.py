"""Numbers from the host to the device and back, without waiting for the work that is queued there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers. A copy from pageable memory would first wait for the stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """What this thread asks of the device runs beside what it is at; at the end it is done."""
    if device.type != "cuda":
        yield
        return
    stream = _side(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _side(device: torch.device) -> Any:
    """One stream for ever: memory that was taken on one is not given out again on another."""
    make: Any = torch.cuda.Stream
    return make(device)


class Download:
    """A copy to the host that is under way; `tensor` waits for it."""

    def __init__(self, source: Tensor) -> None:
        self._event: Any = None
        self._tensor = source
        if source.is_cuda:
            self._tensor = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._tensor.copy_(source, non_blocking=True)
            event: Any = torch.cuda.Event
            self._event = event()
            self._event.record()

    def tensor(self) -> Tensor:
        """The values, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
