"""What bounds one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Every buffer of an engine has its size here.

    max_batch       most sequences in the running batch, whatever `Engine.limit` says
    block_tokens    tokens in one KV block
    kv_bytes        bytes of all KV blocks together
    step_tokens     tokens of one iteration: decodes first, the rest is prefill
    slots           adapter versions resident at once
    max_rank        highest LoRA rank of a slot
    context_tokens  prompt and answer of one request
    max_waiting     requests that may wait for room
    prefix_cache    keep full KV blocks after their request, for others that begin with the same tokens
    fused           use kernels and graphs where the device has them
    run_ahead       begin an iteration before the host has seen the tokens of the one before
    """

    max_batch: int = 8
    block_tokens: int = 16
    kv_bytes: int = 256 * 2**20
    step_tokens: int = 256
    slots: int = 4
    max_rank: int = 16
    context_tokens: int = 1024
    max_waiting: int = 256
    prefix_cache: bool = True
    fused: bool = False
    run_ahead: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least {least}")
        if self.step_tokens < self.max_batch:
            raise ValueError(f"step_tokens {self.step_tokens} is less than max_batch {self.max_batch}")

    @property
    def most_blocks(self) -> int:
        """KV blocks that a full batch of full contexts uses, and the reserved one."""
        return self.max_batch * -(-self.context_tokens // self.block_tokens) + 1


_LEAST = {
    "max_batch": 1,
    "block_tokens": 1,
    "kv_bytes": 1,
    "step_tokens": 1,
    "slots": 0,
    "max_rank": 1,
    "context_tokens": 2,
    "max_waiting": 1,
}
