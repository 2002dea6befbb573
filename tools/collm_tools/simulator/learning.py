"""How answers get better with training: a learning curve, its shape from federated runs of the demo."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

DEMO_ROUNDS = ((0, 4.80), (96, 1.42), (192, 0.79))
"""(samples trained, held-out cross-entropy): three clients, two rounds of eight steps of four samples, 135M model."""

UNLIKE_ROUNDS = ((0, 6.688), (240, 5.700), (480, 5.422), (720, 5.299), (960, 5.242))
"""The same of clients with unlike data and a model of 1.3M (docs/results/federated.md, product aggregation)."""


class Curve(Struct, frozen=True):
    """CE(s) = end + (start - end) exp(-s / scale), s in effective samples; nats.

    An exponential goes through the demo's rounds, and near those on unlike data (`fitted`). Start and end default to
    what makes under 10 % of the answers of an untrained model, and over 80 % of a trained one's, better than quality 1,
    as in the paper's figure 12a; the scale is an assumption, whose bearing docs/results shows. `spread` is the standard
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


def fitted(rounds: Sequence[tuple[float, float]]) -> Curve:
    """The exponential of least squares through (samples, cross-entropy), of at least three rounds."""
    samples, measured = np.array(rounds).T
    found: list[tuple[float, Curve]] = []
    for scale in np.geomspace(samples[-1] / 50, samples[-1] * 5, 2000):
        columns = np.column_stack([np.ones_like(samples), np.exp(-samples / scale)])
        (end, fall), *_ = np.linalg.lstsq(columns, measured, rcond=None)
        error = float(((columns @ (end, fall) - measured) ** 2).sum())
        found.append((error, Curve(float(end + fall), float(end), float(scale))))
    return min(found, key=lambda pair: pair[0])[1]


def effective(samples: float, batch: float, noise_scale: float) -> float:
    """What `samples` in batches of `batch` are worth: p / (p + M) of as many in the smallest (McCandlish et al.)."""
    return samples * noise_scale / (noise_scale + batch)
