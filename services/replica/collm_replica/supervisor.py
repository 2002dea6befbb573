"""The supervisor of one replica: two children, the control stream that commands them, and the line between them.

It loads no torch, so it survives what kills them, reports their deaths and gives their requests back.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis

from collm_common import messages
from collm_common.broker import stop_all
from collm_common.clock import Clock
from collm_common.errors import MessageError, ModelError
from collm_common.messages import Aggregate, Cancel, Configure, Evaluate, LoadAdapter, TrainRound, UnloadAdapter
from collm_common.retry import forever, once
from collm_common.streams import Tail
from collm_replica.channel import (
    AnyLocal,
    Attach,
    DigestReply,
    DigestRequest,
    Drain,
    ExportReply,
    ExportRequest,
    Finished,
    Ready,
    Snapshot,
    Training,
    Yield,
)
from collm_replica.child import Child
from collm_replica.data_endpoint import DataEndpoint
from collm_replica.finetune.records import check_text
from collm_replica.keeper import Keeper
from collm_replica.mps import PIPES
from collm_replica.presence import Presence
from collm_replica.settings import ReplicaSettings
from collm_replica.sharing import Sharing
from collm_replica.sm_share import BACKGROUND, environment
from collm_replica.tasks import Task, failed

log = logging.getLogger(__name__)

T = TypeVar("T")
TRAINING_END_S = 5.0
CONTROL_BATCH = 256
TELL_S = 60.0


class Supervisor:
    """Runs until `stop` is set, then drains. Raises ModelError when a child fails more often than allowed."""

    def __init__(self, settings: ReplicaSettings, redis: Redis, clock: Clock) -> None:
        self.settings, self.redis, self.clock = settings, redis, clock
        self.presence = Presence(settings, redis, clock)
        self.stop = asyncio.Event()
        self._endpoint = DataEndpoint(
            Path(settings.data_dir), settings.max_upload_mb << 20, check_text, self.digest, self.trouble
        )
        self._data_url = ""
        self._weights_fd = os.memfd_create(f"collm-{settings.id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._weights_ready = asyncio.Event()
        self._on_device = False
        self._inference = Keeper(settings, clock, self._spawn_inference, self._inference_ready, self._inference_died)
        self._training = Keeper(settings, clock, self._spawn_training, self._training_ready, self._training_died)
        self._tasks: dict[str, Task] = {}
        self._sharing = Sharing(settings.mps)
        self._sm_share: float | None = None
        self._held: TrainRound | None = None
        self._digests: list[asyncio.Future[str]] = []
        self._exports: list[asyncio.Future[bytes]] = []

    async def run(self) -> None:
        """On the way out every request is finished or given back, and the registry entry is gone."""
        host = self.settings.advertise_host or self.settings.host
        self._data_url = f"http://{host}:{await self._endpoint.start(self.settings.host, self.settings.port)}"
        await self._sharing.start()
        loops = [self.presence.beat(), self._control(), self._inference.run()]
        if self.settings.engine == "torch":
            loops.append(self._keep_training())
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopped = asyncio.create_task(self.stop.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                await self._drain()
            for task in done:
                task.result()
        finally:
            stopped.cancel()
            for keeper in (self._training, self._inference):
                await keeper.end(within_s=0)
            try:
                # A heartbeat on its way would bring the entry back.
                await stop_all(*tasks)
            finally:
                await self.presence.leave()
                await self._endpoint.close()
                await self._sharing.stop()
                os.close(self._weights_fd)

    async def digest(self) -> str:
        """A fresh hash of the base weights, from the process that serves them."""
        reply: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._digests.append(reply)
        await self._inference.send(DigestRequest())
        return await asyncio.wait_for(reply, self.settings.start_timeout_s)

    def trouble(self) -> str:
        """Why requests are not being answered right now; "" if they are."""
        return self._inference.trouble(self.settings.unhealthy_s)

    async def _drain(self) -> None:
        await self.presence.not_ready()
        self._training.ending = self._inference.ending = True
        await self._training.send(Drain())
        await self._inference.send(Drain())
        await self._inference.end(self.settings.drain_s)
        await self._training.end(TRAINING_END_S)

    # --- commands from Redis

    async def _control(self) -> None:
        tail = Tail(self.redis, self.settings.keys.control(self.settings.id))
        await once("control", tail.start, self.clock)

        async def step() -> None:
            for entry in await tail.read(CONTROL_BATCH):
                try:
                    await self._route(messages.decode(entry.data))
                except MessageError as error:
                    log.error("dropping control entry %s: %s", entry.entry_id, error)

        await forever("control", step, self.clock)

    async def _route(self, message: messages.AnyMessage) -> None:
        match message:
            case TrainRound() | Aggregate() | Evaluate():
                self._tasks[messages.kind(message)] = message
                if isinstance(message, TrainRound) and self._changes_share(message):
                    return
                if not await self._training.send(message):
                    await self._fail_tasks("there is no fine-tuning process")
            case messages.Leave():
                log.info("told to leave: %s", message.reason)
                self.stop.set()
            case Cancel() | LoadAdapter() | UnloadAdapter():
                await self._inference.send(message)
            case Configure():
                await self._inference.send(message)
                await self._training.send(message)
            case messages.StopTraining() if self._held is not None and self._held.job == message.job:
                self._held = None
            case messages.PauseTraining() | messages.ResumeTraining() | messages.StopTraining():
                await self._training.send(message)
            case _:
                raise MessageError(f"{messages.kind(message)} is no command for a replica")

    # --- the inference process

    async def _spawn_inference(self) -> Child:
        own, fds = self._sharing.environ, [self._weights_fd]
        return Child("collm_replica.inference", fds, self._from_inference, self.clock, environ=own)

    async def _inference_ready(self, ready: Ready) -> None:
        self._sharing.proven()
        self._on_device = ready.on_device
        self._weights_ready.set()
        await self.presence.up(ready, self._data_url)

    async def _inference_died(self, why: str) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._digests, *self._exports]
        for future in waiting:
            if not future.done():
                future.set_exception(ModelError(f"the inference process died: {why}"))
        self._digests.clear()
        self._exports.clear()
        if self._on_device:
            # Device memory died with its owner: whoever had it mapped must start anew.
            self._weights_ready.clear()
            if self._training.child is not None:
                self._training.child.kill()
        await self._sharing.failed(why)
        await self.presence.down(why)

    async def _from_inference(self, message: AnyLocal) -> None:
        match message:
            case DigestReply():
                _resolve(self._digests, message.digest)
            case ExportReply():
                _resolve(self._exports, message.weights)
            case Yield():
                await self._training.send(message)
            case _:
                pass

    # --- the fine-tuning process

    async def _keep_training(self) -> None:
        """Fine-tuning that cannot be kept up costs the replica its part in jobs, never its requests."""
        try:
            await self._training.run()
        except ModelError as error:
            log.error("no more fine-tuning here until the replica is restarted: %s", error)
            self.presence.can_train = False
        await asyncio.Event().wait()

    async def _spawn_training(self) -> Child:
        while True:
            await self._weights_ready.wait()
            try:
                attach = Attach(weights=await self._export() if self._on_device else b"")
                break
            except (ModelError, TimeoutError) as error:
                log.warning("no export of the weights yet: %s", error)
        fds = [self._weights_fd]
        share = environment(self._sm_share) if self._sm_share is not None else {}
        own = self._sharing.environ | BACKGROUND | share
        return Child("collm_replica.training", fds, self._from_training, self.clock, greeting=attach, environ=own)

    async def _export(self) -> bytes:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._exports.append(reply)
        await self._inference.send(ExportRequest())
        return await asyncio.wait_for(reply, self.settings.start_timeout_s)

    def _changes_share(self, task: TrainRound) -> bool:
        """A CUDA context keeps its share of the SMs: another one takes another process, which gets the task then.

        Without MPS nothing holds a process to a share.
        """
        share = task.sizes.sm_share
        if PIPES not in {**os.environ, **self._sharing.environ}:
            return False
        if share not in self.settings.sm_shares or share == self._sm_share:
            return False
        self._sm_share, self._held = share, task
        self._training.renew()
        return True

    async def _training_ready(self, _: Ready) -> None:
        log.info("the fine-tuning process is ready")
        held, self._held = self._held, None
        if held is not None:
            await self._training.send(held)

    async def _training_died(self, why: str) -> None:
        self._held = None
        await self._inference.send(Training(batch=0))
        await self.presence.announce_finetune(why)
        await self._fail_tasks(f"the fine-tuning process died: {why}")

    async def _fail_tasks(self, reason: str) -> None:
        """Nobody works on them any more: the job must not wait for its deadline."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            event = failed(task, self.settings.id, reason, self.clock.now())
            await self.presence.announce(event, task.job, TELL_S)

    async def _from_training(self, message: AnyLocal) -> None:
        match message:
            case Snapshot() | Training():
                await self._inference.send(message)
            case Finished():
                self._tasks.pop(message.task, None)
            case _:
                pass


def _resolve(waiting: list[asyncio.Future[T]], value: T) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(value)
    waiting.clear()
