"""Numbers from the host to the device and back, without waiting for the work that is queued there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers. A copy from pageable memory would first wait for the stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_all(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies beside the work that the device is at; for any thread. Returns when they are there."""
    if device.type != "cuda":
        return dict(tensors)
    make: Any = torch.cuda.Stream
    stream = make(device)
    with torch.cuda.stream(stream):
        moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    stream.synchronize()
    for tensor in moved.values():
        tensor.record_stream(torch.cuda.default_stream(device))
    return moved


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
