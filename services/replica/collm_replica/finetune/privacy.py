"""Differential privacy of what a client uploads: clipped, noised, and counted over the life of its data.

The unit is a client's whole data: with and without them its change of the adapter, at most `clip_norm` long, moves by
no more than that. One upload with noise of standard deviation sigma * clip_norm is 1/sigma-GDP; k of them are
sqrt(sum 1/sigma^2)-GDP (Dong, Roth, Su 2022), which is exact. Losses and snapshots are not covered.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from collm_common.errors import DataError
from collm_replica.finetune.lowrank import Tensors

BISECTIONS = 100
MAX_EPSILON = 1e6
LEDGER = "privacy.json"


class Spent(Struct, frozen=True, forbid_unknown_fields=True):
    """Sum of 1 / sigma^2 over all uploads."""

    mu_squared: float = 0.0


def privatise(
    tensors: Tensors, start: Tensors, clip_norm: float, noise_multiplier: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The adapter with its change from `start` shortened to `clip_norm` (L2 over all tensors) and noised."""
    changes = {name: tensor.float() - start[name].float() for name, tensor in tensors.items()}
    norm = math.sqrt(sum(float(change.double().pow(2).sum()) for change in changes.values()))
    share = min(1.0, clip_norm / norm) if norm > 0 else 1.0
    deviation = noise_multiplier * clip_norm
    return {
        name: start[name].float() + share * change + deviation * torch.randn(change.shape, generator=generator)
        for name, change in changes.items()
    }


def epsilon(mu: float, delta: float) -> float:
    """The epsilon that mu-GDP gives at `delta`: Phi(-e/mu + mu/2) - exp(e) Phi(-e/mu - mu/2) = delta."""
    if mu <= 0 or _delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while _delta(high, mu) > delta and high < MAX_EPSILON:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta(middle, mu) > delta else (low, middle)
    return high


class Ledger:
    """What was spent on the data of a folder, kept beside them, so that neither a restart nor another job forgets."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER

    def spend(self, noise_multiplier: float) -> float:
        """Enter one upload before it is made; mu of all so far. Raises DataError if the ledger is damaged."""
        spent = Spent(self._read().mu_squared + noise_multiplier**-2)
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(spent))
        partial.rename(self._path)
        return math.sqrt(spent.mu_squared)

    def _read(self) -> Spent:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Spent)
        except FileNotFoundError:
            return Spent()
        except msgspec.DecodeError as error:
            raise DataError(f"{self._path} is damaged: {error}: what was spent is not known") from error


def _delta(eps: float, mu: float) -> float:
    """In logarithms, as exp(e) alone would overflow."""
    tail = _log_phi(-eps / mu - mu / 2)
    return _phi(-eps / mu + mu / 2) - (math.exp(eps + tail) if tail > -math.inf else 0.0)


def _phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_phi(x: float) -> float:
    """Below where erfc is 0, by its leading term."""
    value = _phi(x)
    return math.log(value) if value > 0 else -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi))
