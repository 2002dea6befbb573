"""Choosing tokens. A draw depends on the request's seed and the token's place in its answer, not on the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collm_common.messages import TokenLogprob
from collm_common.types import SamplingParams

_MASK = 2**64 - 1
ROWS = 64


@dataclass(frozen=True)
class Draw:
    """What one row of logits is sampled with; `position` counts the answer's tokens before this one.

    `edits` (token -> what is added to its logit) come before everything else; only tokens whose bit is set in
    `allowed`, 32-bit words with the lowest token in the lowest bit, can be drawn.
    """

    params: SamplingParams
    position: int
    edits: Mapping[int, float] = field(default_factory=dict)
    allowed: bytes | None = None

    @property
    def greedy(self) -> bool:
        """Whether it is simply the likeliest token."""
        return self.params.temperature <= 0 and not self.edits and self.allowed is None

    @property
    def uniform(self) -> float:
        """In [0, 1), the same for the same seed and position."""
        return (_splitmix(self.params.seed ^ _splitmix(self.position)) >> 11) * 2.0**-53


def _splitmix(state: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014), one output."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token `[n]` of each row `[n, vocabulary]`; -1 where logits are not finite."""
    best, tokens = logits.max(dim=-1)
    return torch.where(torch.isfinite(best), tokens, -1)


def choose(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """One token `[n]` a row of logits `[n, vocabulary]`; -1 where logits are not finite. Does not wait for them."""
    logits = _guided(_edited(logits, draws), draws)
    best, tokens = logits.max(dim=-1)
    plain = [i for i, d in enumerate(draws) if d.params.temperature > 0 and not _filtered(d.params)]
    cut = [i for i, d in enumerate(draws) if d.params.temperature > 0 and _filtered(d.params)]
    if plain:
        tokens[plain] = _sample_plain(logits[plain], [draws[i] for i in plain])
    if cut:
        tokens[cut] = _sample_filtered(logits[cut], [draws[i] for i in cut])
    return torch.where(torch.isfinite(best), tokens, -1)


def _edited(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The logits with every row's edits, in float32; the same tensor when there are none."""
    places = [(row, token) for row, draw in enumerate(draws) for token in draw.edits]
    if not places:
        return logits
    rows, tokens = torch.tensor(places, device=logits.device).unbind(-1)
    values = torch.tensor([value for draw in draws for value in draw.edits.values()], device=logits.device)
    return logits.float().index_put((rows, tokens), values, accumulate=True)


def _guided(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The logits without the tokens that are not allowed; the same tensor when all are."""
    masks = [(row, draw.allowed) for row, draw in enumerate(draws) if draw.allowed is not None]
    if not masks:
        return logits
    packed = torch.frombuffer(bytearray(b"".join(mask for _, mask in masks)), dtype=torch.uint8)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (packed.to(logits.device).view(len(masks), -1, 1) >> bits & 1).bool().flatten(1)
    rows = torch.tensor([row for row, _ in masks], device=logits.device)
    kept = logits[rows].masked_fill(~allowed[:, : logits.shape[-1]], -torch.inf)
    return logits.index_put((rows,), kept)


def _filtered(params: SamplingParams) -> bool:
    return params.top_p < 1 or params.top_k > 0 or params.min_p > 0


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _probabilities(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    return torch.softmax(logits.double() / _column([draw.params.temperature for draw in draws], logits), dim=-1)


def _invert(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Index `[n]` at which the running sum of the weights passes the row's uniform share of their total."""
    sums = weights.cumsum(dim=-1)
    share = _column([draw.uniform for draw in draws], weights) * sums[:, -1:]
    return torch.searchsorted(sums, share, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _sample_plain(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    return _invert(_probabilities(logits, draws), draws)


def _sample_filtered(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Keep what has min_p of the likeliest's probability, the top_k likeliest, the fewest that have top_p of the rest.

    min_p: Nguyen et al. 2024, "Turning up the heat".
    """
    weights, order = _probabilities(logits, draws).sort(dim=-1, descending=True, stable=True)
    min_p = _column([draw.params.min_p for draw in draws], logits)
    weights = weights.masked_fill(weights < min_p * weights[:, :1], 0.0)
    vocabulary = weights.shape[-1]
    rank = torch.arange(vocabulary, device=logits.device)
    top_k = _column([draw.params.top_k or vocabulary for draw in draws], logits)
    weights = weights.masked_fill(rank >= top_k, 0.0)
    weights /= weights.sum(dim=-1, keepdim=True)
    above = weights.cumsum(dim=-1) - weights
    top_p = _column([draw.params.top_p for draw in draws], logits)
    weights = weights.masked_fill((above >= top_p) & (rank > 0), 0.0)
    return order.gather(-1, _invert(weights, draws)[:, None]).squeeze(-1)


def logprobs(logits: Tensor, targets: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows `[n, vocabulary]`: log-probabilities `[n]` of their targets `[n]`, and of the `count` likeliest tokens
    `[n, count]` with those tokens `[n, count]`. A few rows at a time, for they are computed in float32.
    """
    parts = []
    for rows, wanted in zip(torch.split(logits, ROWS), torch.split(targets, ROWS), strict=True):
        each = torch.log_softmax(rows.float(), dim=-1)
        parts.append((each.gather(-1, wanted[:, None]).squeeze(-1), *each.topk(min(count, each.shape[-1]))))
    chosen, values, tokens = (torch.cat(part) for part in zip(*parts, strict=True))
    return chosen, values, tokens


def logprob(logits: Tensor, token: int, count: int) -> TokenLogprob:
    """Log-probability of `token` and of the `count` likeliest under one row of logits, before any filter."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token=token, logprob=float(logprobs[token]), top=top)
