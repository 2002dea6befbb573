"""How answers get better with training: a learning curve, its shape from federated runs of the demo."""

from __future__ import annotations

import math

from msgspec import Struct

DEMO_ROUNDS = ((0, 4.797), (96, 3.038), (192, 2.537))
"""(samples trained, held-out cross-entropy): three clients, two rounds of eight steps of four samples, 135M model."""


class Curve(Struct, frozen=True):
    """CE(s) = end + (start - end) exp(-s / scale), s in effective samples; nats.

    The exponential goes through all three points of the demo's rounds (`demo_curve`). Start and end default to what
    makes under 10 % of the answers of an untrained model, and over 80 % of a trained one's, better than quality 1, as
    in the paper's figure 12a; the scale is an assumption, whose bearing docs/results shows. `spread` is the standard
    deviation of log CE between requests.
    """

    start: float = 1.6
    end: float = 0.68
    scale: float = 20_000.0
    spread: float = 0.35

    def cross_entropy(self, samples: float) -> float:
        """Mean over requests after `samples` effective samples."""
        return self.end + (self.start - self.end) * math.exp(-samples / self.scale)

    def samples_to(self, cross_entropy: float) -> float:
        """Effective samples until the mean is this low; infinite if it never is."""
        share = (cross_entropy - self.end) / (self.start - self.end)
        return -self.scale * math.log(share) if share > 0 else math.inf


def demo_curve() -> Curve:
    """The exponential through the demo's three points, which are equally far apart."""
    (_, first), (step, second), (_, third) = DEMO_ROUNDS
    end = (first * third - second**2) / (first + third - 2 * second)
    return Curve(first, end, -step / math.log((second - end) / (first - end)))


def effective(samples: float, batch: float, noise_scale: float) -> float:
    """What `samples` in batches of `batch` are worth: p / (p + M) of as many in the smallest (McCandlish et al.)."""
    return samples * noise_scale / (noise_scale + batch)
