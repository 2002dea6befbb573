"""One client of a federated job in virtual time: optimiser steps beside, or instead of, its replica's requests."""

from __future__ import annotations

from dataclasses import dataclass

from collm_common.messages import TrainReport, TrainRound
from collm_common.types import BatchSizes
from collm_tools.simulator.learning import effective
from collm_tools.simulator.replica import Replica


@dataclass
class Client:
    """A round on one replica. `done` is effective samples of this round, `wanted` its micro-steps."""

    replica: Replica
    command: TrainRound
    noise_scale: float
    wanted: float
    done: float = 0.0
    samples: float = 0.0
    reported_s: float = 0.0
    began_micro_steps: float = 0.0
    seen_micro_steps: float = 0.0
    seen_train_s: float = 0.0

    @classmethod
    def begin(cls, now: float, replica: Replica, command: TrainRound, noise_scale: float) -> Client:
        """From the first micro-step on."""
        replica.advance(now)
        steps, seconds = replica.micro_steps, replica.train_s
        wanted = float(command.steps * command.hyper.accumulation)
        return cls(replica, command, noise_scale, wanted, 0.0, 0.0, now, steps, steps, seconds)

    @property
    def left(self) -> float:
        """Micro-steps to go."""
        return self.began_micro_steps + self.wanted - self.replica.micro_steps

    def left_s(self) -> float:
        """Seconds to go, if nothing changes; at least a moment, and a while if it is paused."""
        train = self.replica.training
        return max(1e-3, self.left * self.replica.hardware.micro_step[train]) if train else 5.0

    def look(self, now: float) -> TrainReport | None:
        """Account for what was trained since the last look; the telemetry of it, if there was any."""
        self.replica.advance(now)
        steps, seconds = self.replica.micro_steps - self.seen_micro_steps, self.replica.train_s - self.seen_train_s
        self.seen_micro_steps, self.seen_train_s = self.replica.micro_steps, self.replica.train_s
        train, accumulation = self.replica.train, self.command.hyper.accumulation
        samples = steps * train
        self.samples += samples
        self.done += effective(samples, train * accumulation, self.noise_scale)
        if steps <= 0 or seconds <= 0 or not train:
            return None
        return TrainReport(
            replica=self.replica.id,
            job=self.command.job,
            round=self.command.round,
            step=max(1, int((self.replica.micro_steps - self.began_micro_steps) / accumulation)),
            time_s=now,
            sizes=BatchSizes(train, self.replica.b),
            step_s=seconds / steps,
            samples=max(1, round(samples)),
            loss=0.0,
            noise_scale=self.noise_scale,
        )
