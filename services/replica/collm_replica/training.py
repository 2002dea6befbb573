"""`python -m collm_replica.training CHANNEL_FD WEIGHTS_FD`: the process that fine-tunes on the shared weights."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

import uvloop

from collm_common import logs
from collm_common.broker import connection, stop_all
from collm_common.clock import SystemClock
from collm_common.messages import (
    Aggregate,
    Configure,
    Evaluate,
    PauseTraining,
    ResumeTraining,
    StopTraining,
    TrainRound,
)
from collm_common.settings import load
from collm_replica.channel import Alive, Attach, Channel, Drain, Ready, Yield
from collm_replica.child import die_with_parent
from collm_replica.inference import ALIVE_S
from collm_replica.loading import prepare_training
from collm_replica.settings import ReplicaSettings
from collm_replica.training_tasks import TrainingTasks

log = logging.getLogger(__name__)


async def listen(channel: Channel, tasks: TrainingTasks) -> None:
    """Carry out what the supervisor says until it wants this process to end, or is gone."""
    while not isinstance(message := await channel.receive(), Drain | None):
        match message:
            case TrainRound() | Aggregate() | Evaluate():
                tasks.add(message)
            case PauseTraining():
                tasks.pause()
            case ResumeTraining():
                tasks.resume()
            case Yield():
                tasks.let_decoding_go_first(message.wanted)
            case StopTraining():
                tasks.leave(message.job)
            case Configure():
                tasks.trainer.set_batch(message.sizes.train)
            case _:
                log.error("unexpected %s", type(message).__name__)


async def say_alive(channel: Channel, tasks: TrainingTasks) -> None:
    """Tell the supervisor that micro-steps are made, or that there is nothing to do."""
    while True:
        await channel.send(Alive(progress=tasks.progress, busy=tasks.busy))
        await asyncio.sleep(ALIVE_S)


async def run(settings: ReplicaSettings, channel_fd: int, weights_fd: int) -> None:
    """Attach to the weights, then work on tasks until the supervisor ends this process."""
    channel = await Channel.over(socket.socket(fileno=channel_fd))
    attach = await channel.receive()
    assert isinstance(attach, Attach), "the supervisor greets with Attach"
    trainer, base_digest = await asyncio.to_thread(prepare_training, settings, weights_fd, attach.weights)
    async with connection(settings.redis_url) as redis:
        tasks = TrainingTasks(settings, redis, trainer, base_digest, SystemClock(), channel.send)
        await channel.send(Ready())
        loops = [asyncio.create_task(loop) for loop in (tasks.run(), listen(channel, tasks), say_alive(channel, tasks))]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await stop_all(*loops)


def main() -> None:
    """Ends with its supervisor, leaves Ctrl-C to it, and never competes with inference on equal terms."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = load(ReplicaSettings, "replica")
    os.nice(settings.finetune_nice)
    logs.setup(f"replica {settings.id} training", settings.log_level, settings.log_json)
    uvloop.run(run(settings, int(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
