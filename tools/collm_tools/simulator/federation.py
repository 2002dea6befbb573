"""The live launcher's policy in virtual time, with clients that train and adapters that get better."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

from msgspec import Struct

from collm_common.latency import LatencyModel
from collm_common.messages import (
    Aggregate,
    Aggregated,
    Control,
    Evaluate,
    Evaluated,
    Hyperparams,
    JobChanged,
    LoadAdapter,
    StateChanged,
    StopTraining,
    TrainRound,
    UpdateUploaded,
)
from collm_common.types import Quality, ReplicaInfo, ReplicaState
from collm_launcher.loads import Loads
from collm_launcher.policy import rounds
from collm_launcher.policy.idle import IdleRules
from collm_launcher.policy.job import Action, Announce, Job, Publish, Return, Rules, Score, Send
from collm_tools.simulator.cell import Cell, Timer
from collm_tools.simulator.client import Client
from collm_tools.simulator.coordinating import Coordinating, CoordinatorRules
from collm_tools.simulator.learning import Curve
from collm_tools.simulator.replica import Replica

HELDOUT_TOKENS = 4096


class Training(Struct, frozen=True):
    """How training goes on. Seconds, where a name says so.

    `apart`: a client takes no requests, begins after `load_s` with a copy of its own. Without `snapshots`, replicas get
    what was learnt when the job has ended; with them, each client's engine serves what it has trained so far.
    """

    rules: Rules = Rules(rounds=6, train_s=3600.0, hyper=Hyperparams(accumulation=8, snapshot_steps=5))
    idle: IdleRules = IdleRules()
    tick_s: float = 5.0
    fit_s: float = 300.0
    cooldown_s: float = 60.0
    combined_share: float = 0.5
    aggregate_s: float = 2.0
    evaluate_s: float = 5.0
    noise_scale: float = 128.0
    curve: Curve = Curve()
    apart: bool = False
    load_s: float = 30.0
    snapshots: bool = True
    seed: int = 0


class Federation:
    """Launcher, coordinator and clients of one model. `reached` holds (s, mean held-out cross-entropy) as published."""

    def __init__(
        self, cell: Cell, training: Training, coordinator: CoordinatorRules, latency: dict[str, LatencyModel]
    ) -> None:
        self.cell, self.training = cell, training
        self.replicas = dict(cell.replicas)
        self.job: Job | None = None
        self.jobs = 0
        self.version, self.following = 0, 1
        self.samples = {0: 0.0}
        self.reached: list[tuple[float, float]] = [(0.0, training.curve.start)]
        self.coordinating = Coordinating(coordinator, self.replicas, latency, cell.settle)
        self._loads = Loads(training.idle, training.combined_share)
        self._jobs: dict[str, str] = {}
        self._clients: dict[str, Client] = {}
        self._next_job_s = 0.0
        self._random = random.Random(training.seed)
        for replica in self.replicas.values():
            replica.loss = training.curve.start
        cell.on_state.append(self._state_changed)
        self.spent_s = 0.0
        cell.every(training.tick_s, self._counted(self._tick))
        cell.every(training.fit_s, self._counted(self.coordinating.fit))

    def _counted(self, timer: Timer) -> Timer:
        """With its time in `spent_s`: what launcher and coordinator think, and what is simulated around it."""

        def timed(now: float) -> None:
            began_s = time.perf_counter()
            timer(now)
            self.spent_s += time.perf_counter() - began_s

        return timed

    # --- ticks

    def _tick(self, now: float) -> None:
        for id_, replica in self.replicas.items():
            report = replica.report(now)
            self._loads.hear(report)
            self.coordinating.hear(report)
            if (client := self._clients.get(id_)) is not None:
                self._look(now, client)
        if self.job is not None:
            self._act(now, rounds.on_tick(self.job, now, self._usable(self.job)))
        infos = {id_: self._info(replica) for id_, replica in self.replicas.items()}
        self._loads.tick(infos, self.coordinating.sizes)
        may = self.job is None and now >= self._next_job_s and len(infos) >= self.training.rules.min_clients
        start_from = self.training.rules.min_clients if may else None
        for move in self._loads.moves("m", infos, start_from):
            if start_from is not None or move.after is not ReplicaState.IDLE:
                self._loads.moved(move)
                self.cell.change(self.replicas[move.replica], move.after, move.reason)
        if may:
            self._start(now)

    def _info(self, replica: Replica) -> ReplicaInfo:
        return ReplicaInfo(
            id=replica.id,
            model="m",
            incarnation="1",
            state=self._state(replica),
            ready=True,
            infer_batch_max=replica.most,
            context_tokens=1,
            base_digest="w",
            quality=replica.quality,
            job=self._jobs.get(replica.id, ""),
        )

    def _state(self, replica: Replica) -> ReplicaState:
        """Who trains apart is Combined to its job, and Idle to everybody else."""
        apart = self.training.apart and replica.id in self._jobs and replica.state is ReplicaState.IDLE
        return ReplicaState.COMBINED if apart else replica.state

    def _usable(self, job: Job) -> set[str]:
        usable = set()
        for id_, client in job.clients.items():
            state = self._state(self.replicas[id_])
            if state is ReplicaState.COMBINED or (state is ReplicaState.IDLE and not client.joined):
                usable.add(id_)
        return usable

    def _start(self, now: float) -> None:
        members = rounds.choose([self._info(replica) for replica in self.replicas.values()], self.training.rules)
        if not members:
            return
        self.jobs += 1
        job, actions = rounds.start(
            f"j{self.jobs}", now, members, "a", self.version, self.following, self.training.rules, self.training.seed
        )
        self.job = job
        self._jobs = {info.id: job.id for info in members}
        self._act(now, actions)

    # --- events to the job

    def _event(self, event: object) -> None:
        if self.job is not None:
            self._act(self.cell.now, rounds.on_event(self.job, self.cell.now, event))

    def _later(self, event: object, now: float) -> None:
        self._event(event)

    def _state_changed(self, now: float, replica: Replica, before: ReplicaState, reason: str) -> None:
        if replica.state is ReplicaState.SERVING:
            self._stop(now, replica)
        changed = StateChanged(replica=replica.id, before=before, after=replica.state, reason=reason, time_s=now)
        self._event(changed)

    def _join(self, now: float) -> None:
        """The coordinator makes the clients Combined, with first sizes."""
        assert self.job is not None
        for id_ in list(self.job.clients):
            replica = self.replicas[id_]
            if replica.state is not ReplicaState.IDLE:
                continue
            if self.training.apart:
                event = StateChanged(
                    replica=id_, before=ReplicaState.IDLE, after=ReplicaState.COMBINED, reason="apart", time_s=now
                )
                self.coordinating.first(now, self.job.id, replica)
                self.cell.at(now + self.training.load_s, partial(self._later, event))
            else:
                self.coordinating.first(now, self.job.id, replica)
                self.cell.change(replica, ReplicaState.COMBINED, f"job {self.job.id} starts")

    # --- what the job asks for

    def _act(self, now: float, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._command(now, self.replicas[action.replica], action.command)
                case Announce(event=JobChanged(status="forming")):
                    self._join(now)
                case Return():
                    self._free(now, self.replicas[action.replica], action)
                case Score():
                    self.replicas[action.replica].quality = action.quality
                case Publish():
                    self._publish(now, action.version)
        if self.job is not None and self.job.ended:
            self._end(now, self.job)

    def _command(self, now: float, replica: Replica, command: Control) -> None:
        match command:
            case TrainRound():
                sizes = self.coordinating.sizes[replica.id]
                replica.configure(now, sizes.infer, sizes.train)
                self.cell.settle(replica)
                client = self._clients[replica.id] = Client.begin(now, replica, command, self.training.noise_scale)
                self.cell.at(now + client.left_s(), self._counted(partial(self._due, client)))
            case Aggregate():
                self.cell.at(now + self.training.aggregate_s, partial(self._aggregated, command))
            case Evaluate():
                self.cell.at(now + self.training.evaluate_s, partial(self._evaluated, replica.id, command))
            case StopTraining():
                self._stop(now, replica)
            case LoadAdapter():
                replica.loss = self._loss(command.version)

    def _due(self, client: Client, now: float) -> None:
        """The round may be over by now; if it was slowed down, look again later."""
        replica = client.replica
        if self._clients.get(replica.id) is not client:
            return
        self._look(now, client)
        if client.left > 1e-6:
            self.cell.at(now + client.left_s(), self._counted(partial(self._due, client)))
            return
        replica.configure(now, replica.b, 0)
        self.cell.settle(replica)
        command, before = client.command, self.samples[client.command.start]
        loss = self.training.curve.cross_entropy(before + client.done / 2) * self._random.gauss(1.0, 0.005)
        self.coordinating.refit(now, replica, settle=True)
        if self.job is not None:
            self.job.sizes.update(self.coordinating.sizes)
        self._event(
            UpdateUploaded(
                job=command.job,
                round=command.round,
                replica=replica.id,
                samples=max(1, round(client.samples)),
                loss=loss,
                loss_last=loss,
                noise_scale=client.noise_scale,
                time_s=now,
            )
        )

    def _look(self, now: float, client: Client) -> None:
        if (report := client.look(now)) is not None:
            self.coordinating.hear(report)
            self.coordinating.probe(now, client.replica, report)
        if self.training.snapshots:
            samples = self.samples[client.command.start] + client.done
            client.replica.loss = min(client.replica.loss, self.training.curve.cross_entropy(samples))

    def _aggregated(self, command: Aggregate, now: float) -> None:
        gained = sum(self._clients[id_].done for id_ in command.clients if id_ in self._clients)
        self.samples[command.version] = self.samples[command.parent] + gained
        self.following = max(self.following, command.version + 1)
        self._event(
            Aggregated(
                job=command.job,
                round=command.round,
                adapter=command.adapter,
                version=command.version,
                residual=0.0,
                time_s=now,
            )
        )

    def _evaluated(self, replica: str, command: Evaluate, now: float) -> None:
        self._event(
            Evaluated(
                job=command.job,
                round=command.round,
                replica=replica,
                adapter=command.adapter,
                version=command.version,
                quality=Quality(self._loss(command.version), HELDOUT_TOKENS),
                time_s=now,
            )
        )

    def _loss(self, version: int) -> float:
        return self.training.curve.cross_entropy(self.samples[version])

    def _publish(self, now: float, version: int) -> None:
        self.version = version
        self.reached.append((now, self._loss(version)))
        if self.training.snapshots:
            self._deploy()

    def _deploy(self) -> None:
        for replica in self.replicas.values():
            replica.loss = self._loss(self.version)

    # --- ends

    def _stop(self, now: float, replica: Replica) -> None:
        client = self._clients.pop(replica.id, None)
        if client is not None:
            client.look(now)
        replica.train = 0
        self.coordinating.restore(now, replica)
        self.cell.settle(replica)

    def _free(self, now: float, replica: Replica, action: Return) -> None:
        self._jobs.pop(replica.id, None)
        if self._state(replica) is action.before or replica.state is ReplicaState.IDLE:
            self.cell.change(replica, ReplicaState.SERVING, action.reason)

    def _end(self, now: float, job: Job) -> None:
        self.job = None
        self._jobs = {}
        self._next_job_s = now + self.training.cooldown_s
        self._deploy()
