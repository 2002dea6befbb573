"""Federated rounds as a state machine: events and ticks in, actions out (paper section 4).

forming -> training -> aggregating -> evaluating -> (gate, canary) -> training … -> done. Three replicas are needed to
start, not to go on; one that dies, is recalled or fails costs its update, not the round.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from collm_common.messages import (
    AdapterRolledBack,
    Aggregated,
    Evaluated,
    LoadAdapter,
    StateChanged,
    StopTraining,
    TaskFailed,
    UpdateUploaded,
)
from collm_common.types import ReplicaInfo, ReplicaState
from collm_launcher.policy.job import Action, Clean, Client, Forget, Job, Phase, Return, Rules, Send
from collm_launcher.policy.phases import (
    aggregate_again,
    aggregate_if_complete,
    aggregated,
    announce,
    another_server,
    begin_canary,
    drop_round,
    end,
    end_canary,
    give_up,
    judge,
    judge_if_complete,
    rolled_back,
    take_back,
    train,
    train_if_formed,
)


def choose(idle: Collection[ReplicaInfo], rules: Rules) -> list[ReplicaInfo]:
    """The largest group of ready idle replicas on the same weights, if it has `min_clients`; else nobody."""
    groups: dict[str, list[ReplicaInfo]] = {}
    for info in sorted(idle, key=lambda info: info.id):
        free = info.ready and info.alive and info.state is ReplicaState.IDLE and not info.job
        if free and able(info, rules):
            groups.setdefault(info.base_digest, []).append(info)
    best = max(groups.values(), key=len, default=[])
    return best if len(best) >= rules.min_clients else []


def able(info: ReplicaInfo, rules: Rules) -> bool:
    """Whether a replica could train in a job of these rules."""
    return info.trainable and info.train_rank >= rules.least_rank


def start(
    id_: str,
    now: float,
    members: Collection[ReplicaInfo],
    adapter: str,
    version: int,
    next_version: int,
    rules: Rules,
    seed: int,
) -> tuple[Job, list[Action]]:
    """A new job over `members`."""
    job = Job(
        id=id_,
        model=next(iter(members)).model,
        adapter=adapter,
        server="",
        clients={},
        version=version,
        next_version=next_version,
        rules=rules,
        seed=seed,
    )
    return job, form(job, now, members)


def form(job: Job, now: float, members: Collection[ReplicaInfo]) -> list[Action]:
    """Ask idle replicas to join; the one with the highest Q serves, ties by id."""
    job.server = min(members, key=lambda info: (-info.quality, info.id)).id
    job.clients = {
        info.id: Client(info.quality, min(job.rules.hyper.rank, info.train_rank))
        for info in sorted(members, key=lambda info: info.id)
    }
    job.phase, job.deadline_s = Phase.FORMING, now + job.rules.form_s
    return [announce(job, now, f"{len(members)} idle replicas, server {job.server}")]


def pause(job: Job, now: float) -> list[Action]:
    """Every client goes back to serving, under the last accepted version; the round is begun again some day."""
    if job.ended or job.phase is Phase.PAUSED:
        return []
    if job.phase is Phase.WAITING:
        job.phase = Phase.PAUSED
        return [announce(job, now, "paused")]
    job.lost += job.phase is not Phase.FORMING
    actions = [*drop_round(job), *take_back(job), *end(job, now, Phase.PAUSED, "paused")]
    job.clients, job.uploads, job.deadline_s = {}, {}, math.inf
    return actions


def resume(job: Job, now: float) -> list[Action]:
    """Go on, as soon as replicas are idle."""
    if job.phase is not Phase.PAUSED:
        return []
    job.phase = Phase.WAITING
    return [announce(job, now, "waits for idle replicas")]


def cancel(job: Job, now: float) -> list[Action]:
    """Nobody wants the job any more; what was published stays."""
    if job.ended:
        return []
    tried = take_back(job) if job.phase is Phase.CANARY else []
    return [*drop_round(job), *tried, *end(job, now, Phase.FAILED, "cancelled")]


def on_event(job: Job, now: float, event: object) -> list[Action]:
    """React to what a replica or the coordinator says; what belongs to another job or round is ignored."""
    if job.ended:
        return []
    match event:
        case StateChanged():
            return _state_changed(job, now, event)
        case AdapterRolledBack(name=job.adapter):
            return rolled_back(job, now, event.version, event.reason)
        case UpdateUploaded(job=job.id, round=job.round) if job.phase is Phase.TRAINING:
            return _uploaded(job, now, event)
        case Aggregated(job=job.id, version=job.candidate) if job.phase is Phase.AGGREGATING:
            return aggregated(job, now, event.refused, event.residual)
        case Aggregated(job=job.id) if event.version in job.abandoned:
            return [Forget(event.version)]
        case Evaluated(job=job.id) if event.replica in job.clients:
            job.measured.setdefault(event.version, {})[event.replica] = event.quality
            return judge_if_complete(job, now)
        case TaskFailed(job=job.id, round=job.round) if event.replica in job.clients:
            return _task_failed(job, now, event)
    return []


def on_tick(job: Job, now: float, usable: Collection[str]) -> list[Action]:
    """Let go of clients that are not in `usable` (alive and still the job's), then see to the deadline."""
    if job.ended or job.stands:
        return []
    actions: list[Action] = []
    for id_ in [id_ for id_ in job.clients if id_ not in usable]:
        actions += _lose(job, now, id_, "not available any more")
    if not job.ended and now >= job.deadline_s:
        actions += _deadline(job, now)
    return actions


# --- clients


def _uploaded(job: Job, now: float, event: UpdateUploaded) -> list[Action]:
    if event.replica not in job.clients:
        return []
    if math.isfinite(event.loss):
        job.uploads[event.replica] = event.loss
        return aggregate_if_complete(job, now)
    job.clients[event.replica].expected = False
    return [announce(job, now, f"{event.replica} diverged: its update is left out"), *aggregate_if_complete(job, now)]


def _state_changed(job: Job, now: float, event: StateChanged) -> list[Action]:
    client = job.clients.get(event.replica)
    if client is None:
        return []
    if event.after is ReplicaState.COMBINED:
        client.joined = True
        return train_if_formed(job, now) if job.phase is Phase.FORMING else []
    if event.after is ReplicaState.IDLE and not client.joined:
        return []
    return _lose(job, now, event.replica, f"recalled: {event.reason}")


def _lose(job: Job, now: float, replica: str, reason: str) -> list[Action]:
    """A client is gone; its state is another's business. The round goes on with the rest, if any."""
    del job.clients[replica]
    actions: list[Action] = [
        Send(replica, StopTraining(job=job.id)),
        announce(job, now, f"{replica} left: {reason}"),
    ]
    if replica not in job.uploads:
        # It may have died over its upload: half of one is there, and will not expire.
        actions.append(Clean(job.round, (replica,)))
    if job.phase is Phase.CANARY and replica == job.server:
        actions.append(Send(replica, LoadAdapter(name=job.adapter, version=job.version)))
    if not job.clients:
        return [*actions, *drop_round(job), *give_up(job, now, "no client is left")]
    if replica == job.server:
        job.server = min(job.clients, key=lambda id_: (-job.clients[id_].quality, id_))
        if job.phase is Phase.AGGREGATING:
            return [*actions, *aggregate_again(job, now)]
        if job.phase is Phase.CANARY:
            return [*actions, *begin_canary(job, now)]
    return [*actions, *_progress(job, now)]


def _task_failed(job: Job, now: float, event: TaskFailed) -> list[Action]:
    reason = f"{event.replica} failed at {event.task}: {event.reason}"
    if event.task == "train_round" and job.phase is Phase.TRAINING:
        job.clients[event.replica].expected = False
        return [announce(job, now, reason), *aggregate_if_complete(job, now)]
    if event.task == "aggregate" and job.phase is Phase.AGGREGATING and event.replica == job.server:
        return [announce(job, now, reason), *another_server(job, now)]
    if event.task == "evaluate" and job.phase is Phase.EVALUATING:
        job.clients[event.replica].expected = False
        return [announce(job, now, reason), *judge_if_complete(job, now)]
    return []


def _progress(job: Job, now: float) -> list[Action]:
    """What the phase may do now that one client less is waited for."""
    match job.phase:
        case Phase.FORMING:
            return train_if_formed(job, now)
        case Phase.TRAINING:
            return aggregate_if_complete(job, now)
        case Phase.EVALUATING:
            return judge_if_complete(job, now)
    return []


# --- deadlines


def _deadline(job: Job, now: float) -> list[Action]:
    match job.phase:
        case Phase.FORMING:
            late = [id_ for id_, client in job.clients.items() if not client.joined]
            if len(job.clients) - len(late) < job.rules.min_clients:
                return give_up(job, now, f"{', '.join(late)} did not join in {job.rules.form_s:g} s")
            actions: list[Action] = []
            for id_ in late:
                del job.clients[id_]
                actions.append(Return(id_, ReplicaState.IDLE, "did not join in time"))
            return [*actions, *train(job, now)]
        case Phase.TRAINING:
            late = [id_ for id_ in job.clients if id_ not in job.uploads]
            for id_ in late:
                job.clients[id_].expected = False
            stops: list[Action] = [Send(id_, StopTraining(job=job.id)) for id_ in late]
            return [*stops, *aggregate_if_complete(job, now)]
        case Phase.AGGREGATING:
            return another_server(job, now)
        case Phase.CANARY:
            return end_canary(job, now)
        case _:
            return judge(job, now)
