"""The gradient of one optimiser step, gathered from its micro-steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.utils import get_total_norm

from collm_replica.finetune.noise import MicroGradient


class GradientSum:
    """Sums gradients of summed token losses, so that their mean weighs every token alike.

    Each micro-step's gradient is taken off the parameters: what is thrown away before `take` leaves no trace.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._sum: list[torch.Tensor] = []
        self.micro: list[MicroGradient] = []
        self.loss = 0.0
        self.discard()

    @property
    def tokens(self) -> int:
        """Answer tokens so far."""
        return int(sum(gradient.weight for gradient in self.micro))

    @property
    def samples(self) -> int:
        """Samples so far."""
        return sum(gradient.samples for gradient in self.micro)

    def discard(self) -> None:
        """Forget what an unfinished backward pass left on the parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    def take(self, loss: float, tokens: int, samples: int) -> bool:
        """Add what one backward pass of the summed `loss` (nats) left on the parameters; not if it is not finite."""
        own = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        self.discard()
        if not math.isfinite(square(own)):
            return False
        self.micro.append(MicroGradient(square(own) / tokens**2, tokens, samples))
        self._sum = [old.add_(new) for old, new in zip(self._sum, own, strict=True)] if self._sum else own
        self.loss += loss
        return True

    def mean(self) -> list[torch.Tensor]:
        """Gradient of the mean loss over all tokens, in the order of the parameters."""
        return [gradient / self.tokens for gradient in self._sum]


def square(gradient: Sequence[torch.Tensor]) -> float:
    """Squared norm over all tensors together."""
    return float(get_total_norm(gradient)) ** 2
