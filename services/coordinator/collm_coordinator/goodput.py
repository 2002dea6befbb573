"""Training goodput: samples a second that count (paper section 5.1, after Pollux).

B is the micro-batch; with gradient accumulation the effective batch is M = B * accumulation, and M is what the noise
scale p and the efficiency speak of.
"""

from __future__ import annotations


def throughput(effective_batch: float, step_s: float) -> float:
    """M / T_train, samples a second; T_train is the time of a whole optimiser step."""
    return effective_batch / step_s


def efficiency(effective_batch: float, first_batch: float, noise_scale: float, loss_fall: float = 1.0) -> float:
    """max(l, 0) (p + M0) / (p + M): what a sample in a batch of M is worth beside one in the first batch M0.

    l, the mean loss fall per step, cancels where one replica's batch sizes are compared.
    """
    return max(loss_fall, 0.0) * (noise_scale + first_batch) / (noise_scale + effective_batch)


def goodput(
    train_batch: int,
    first_batch: int,
    accumulation: int,
    micro_step_s: float,
    noise_scale: float,
    loss_fall: float = 1.0,
) -> float:
    """THROUGHPUT * EFFICIENCY of the micro-batch B, with `micro_step_s` = T_train(B, b)."""
    effective, first = train_batch * accumulation, first_batch * accumulation
    rate = throughput(effective, micro_step_s * accumulation)
    return rate * efficiency(effective, first, noise_scale, loss_fall)
