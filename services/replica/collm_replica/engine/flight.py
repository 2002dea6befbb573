"""What a run of the model gave, as long as it is still on its way to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from collm_common.messages import TokenLogprob
from collm_replica.engine.protocol import Broken, Outcome, Sampled, Scored, Told
from collm_replica.engine.sampler import logprob, logprobs
from collm_replica.engine.sequence import Chunk
from collm_replica.engine.transfer import Download, upload


class Flight:
    """Of one call of `run`; `outcomes` waits for the device.

    Everything that reads `logits` is queued here and now: the next run may write to the same memory.
    """

    def __init__(self, chunks: Sequence[Chunk], logits: Sequence[Tensor], tokens: Tensor | None) -> None:
        """Logits `[rows, vocabulary]` a chunk, tokens `[n]` of the chunks that sample, -1 where not finite."""
        self._chunks = chunks
        self._tokens = None if tokens is None else Download(tokens)
        self._rows = {
            index: part[-1].clone()
            for index, (chunk, part) in enumerate(zip(chunks, logits, strict=True))
            if chunk.samples and chunk.sequence.request.sampling.logprobs is not None
        }
        self._told = {
            index: PromptLogprobs(part[: len(chunk.told)], chunk.told, chunk.sequence.request.sampling.logprobs or 0)
            for index, (chunk, part) in enumerate(zip(chunks, logits, strict=True))
            if chunk.told
        }
        self._losses = {
            index: Download(losses(part, chunk.targets))
            for index, (chunk, part) in enumerate(zip(chunks, logits, strict=True))
            if chunk.targets
        }

    def outcomes(self) -> list[Outcome]:
        """One a chunk, in order."""
        tokens = iter([] if self._tokens is None else self._tokens.tensor().tolist())
        return [
            self._sampled(index, chunk, next(tokens)) if chunk.samples else self._read(index)
            for index, chunk in enumerate(self._chunks)
        ]

    def _sampled(self, index: int, chunk: Chunk, token: int) -> Outcome:
        if token < 0:
            return Broken("the model's logits are not finite")
        count = chunk.sequence.request.sampling.logprobs
        told = self._told[index].read() if index in self._told else ()
        return Sampled(token, None if count is None else logprob(self._rows[index], token, count), told)

    def _read(self, index: int) -> Outcome:
        if index in self._told:
            return Told(self._told[index].read())
        if index not in self._losses:
            return None
        nll = float(self._losses[index].tensor())
        return Scored(nll) if math.isfinite(nll) else Broken("the reference's loss is not finite")


class PromptLogprobs:
    """On their way to the host: of the prompt's tokens `targets` and the `count` likeliest, one row of logits each."""

    def __init__(self, logits: Tensor, targets: Sequence[int], count: int) -> None:
        self._targets = targets
        self._parts = [Download(part) for part in logprobs(logits, upload(targets, torch.long, logits.device), count)]

    def read(self) -> tuple[TokenLogprob, ...]:
        """Waits for them."""
        chosen, values, tokens = (part.tensor().tolist() for part in self._parts)
        return tuple(
            TokenLogprob(token, value, tuple(zip(likeliest, their, strict=True)))
            for token, value, likeliest, their in zip(self._targets, chosen, tokens, values, strict=True)
        )


def losses(logits: Tensor, targets: Sequence[int]) -> Tensor:
    """Summed cross-entropy (nats) of the targets, on the device."""
    wanted = upload(targets, torch.long, logits.device)
    return cross_entropy(logits.float(), wanted, reduction="sum")
