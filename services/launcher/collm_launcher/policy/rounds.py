"""Federated rounds as a state machine: events and ticks in, actions out (paper section 4).

forming -> training -> aggregating -> evaluating -> (gate) -> training … -> done. Three replicas are needed to start,
not to go on; one that dies, is recalled or fails costs its update, not the round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from collm_common.messages import (
    Aggregate,
    Aggregated,
    Evaluate,
    Evaluated,
    JobChanged,
    LoadAdapter,
    StateChanged,
    StopTraining,
    TaskFailed,
    TrainRound,
    UpdateUploaded,
)
from collm_common.types import BatchSizes, Quality, ReplicaInfo, ReplicaState
from collm_launcher.policy.early_stop import should_stop
from collm_launcher.policy.job import (
    Action,
    Announce,
    Clean,
    Client,
    Forget,
    Job,
    Phase,
    Publish,
    Return,
    Rules,
    Score,
    Send,
)

QUALITY_BOUNDS = (0.1, 10.0)
FIRST_SIZES = BatchSizes(train=1, infer=1)


def choose(idle: Collection[ReplicaInfo], min_clients: int) -> list[ReplicaInfo]:
    """The largest group of ready idle replicas on the same weights, if it has `min_clients`; else nobody."""
    groups: dict[str, list[ReplicaInfo]] = {}
    for info in sorted(idle, key=lambda info: info.id):
        if info.ready and info.alive and info.state is ReplicaState.IDLE and not info.job:
            groups.setdefault(info.base_digest, []).append(info)
    best = max(groups.values(), key=len, default=[])
    return best if len(best) >= min_clients else []


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
    """A new job over `members`; the one with the highest Q serves, ties by id."""
    server = min(members, key=lambda info: (-info.quality, info.id))
    job = Job(
        id=id_,
        model=server.model,
        adapter=adapter,
        server=server.id,
        clients={info.id: Client(info.quality) for info in sorted(members, key=lambda info: info.id)},
        version=version,
        next_version=next_version,
        rules=rules,
        seed=seed,
        deadline_s=now + rules.form_s,
    )
    return job, [_announce(job, now, f"{len(members)} idle replicas, server {server.id}")]


def on_event(job: Job, now: float, event: object) -> list[Action]:
    """React to what a replica or the coordinator says; what belongs to another job or round is ignored."""
    if job.ended:
        return []
    match event:
        case StateChanged():
            return _state_changed(job, now, event)
        case UpdateUploaded(job=job.id, round=job.round) if job.phase is Phase.TRAINING:
            if event.replica in job.clients:
                job.uploads[event.replica] = event.loss
            return _aggregate_if_complete(job, now)
        case Aggregated(job=job.id, round=job.round) if job.phase is Phase.AGGREGATING:
            return _evaluate(job, now)
        case Evaluated(job=job.id) if event.replica in job.clients:
            job.measured.setdefault(event.version, {})[event.replica] = event.quality
            return _judge_if_complete(job, now)
        case TaskFailed(job=job.id, round=job.round) if event.replica in job.clients:
            return _task_failed(job, now, event)
    return []


def on_tick(job: Job, now: float, usable: Collection[str]) -> list[Action]:
    """Let go of clients that are not in `usable` (alive and still the job's), then see to the deadline."""
    if job.ended:
        return []
    actions: list[Action] = []
    for id_ in [id_ for id_ in job.clients if id_ not in usable]:
        actions += _lose(job, now, id_, "not available any more")
    if not job.ended and now >= job.deadline_s:
        actions += _deadline(job, now)
    return actions


# --- clients


def _state_changed(job: Job, now: float, event: StateChanged) -> list[Action]:
    client = job.clients.get(event.replica)
    if client is None:
        return []
    if event.after is ReplicaState.COMBINED:
        client.joined = True
        return _train_if_formed(job, now) if job.phase is Phase.FORMING else []
    if event.after is ReplicaState.IDLE and not client.joined:
        return []
    return _lose(job, now, event.replica, f"recalled: {event.reason}")


def _lose(job: Job, now: float, replica: str, reason: str) -> list[Action]:
    """A client is gone; its state is another's business. The round goes on with the rest, if any."""
    del job.clients[replica]
    actions: list[Action] = [
        Send(replica, StopTraining(job=job.id)),
        _announce(job, now, f"{replica} left: {reason}"),
    ]
    if not job.clients:
        return [*actions, *_end(job, now, Phase.FAILED if not job.accepted else Phase.DONE, "no client is left")]
    if replica == job.server:
        job.server = min(job.clients, key=lambda id_: (-job.clients[id_].quality, id_))
        if job.phase is Phase.AGGREGATING:
            return [*actions, *_aggregate(job, now)]
    return [*actions, *_progress(job, now)]


def _task_failed(job: Job, now: float, event: TaskFailed) -> list[Action]:
    reason = f"{event.replica} failed at {event.task}: {event.reason}"
    if event.task == "train_round" and job.phase is Phase.TRAINING:
        job.clients[event.replica].expected = False
        return [_announce(job, now, reason), *_aggregate_if_complete(job, now)]
    if event.task == "aggregate" and job.phase is Phase.AGGREGATING and event.replica == job.server:
        return [_announce(job, now, reason), *_another_server(job, now)]
    if event.task == "evaluate" and job.phase is Phase.EVALUATING:
        job.clients[event.replica].expected = False
        return [_announce(job, now, reason), *_judge_if_complete(job, now)]
    return []


def _progress(job: Job, now: float) -> list[Action]:
    """What the phase may do now that one client less is waited for."""
    match job.phase:
        case Phase.FORMING:
            return _train_if_formed(job, now)
        case Phase.TRAINING:
            return _aggregate_if_complete(job, now)
        case Phase.EVALUATING:
            return _judge_if_complete(job, now)
    return []


# --- phases


def _train_if_formed(job: Job, now: float) -> list[Action]:
    if len(job.clients) < job.rules.min_clients:
        return _end(job, now, Phase.FAILED, f"{len(job.clients)} clients, {job.rules.min_clients} are needed to start")
    return _train(job, now) if all(client.joined for client in job.clients.values()) else []


def _train(job: Job, now: float) -> list[Action]:
    """The next round; in the first one every client also measures where the job starts."""
    rules = job.rules
    job.round += 1
    job.phase, job.deadline_s = Phase.TRAINING, now + rules.train_s
    job.uploads = {}
    actions: list[Action] = [_announce(job, now, f"{len(job.clients)} clients from version {job.version}")]
    for id_, client in job.clients.items():
        client.expected = True
        if id_ not in job.measured.get(job.version, {}):
            actions.append(Send(id_, _evaluation(job, job.version)))
        command = TrainRound(
            job=job.id,
            round=job.round,
            adapter=job.adapter,
            start=job.version,
            sizes=job.sizes.get(id_, FIRST_SIZES),
            steps=rules.steps,
            first_step=(job.round - 1) * rules.steps,
            total_steps=rules.rounds * rules.steps,
            hyper=rules.hyper,
            seed=job.seed,
            deadline_s=job.deadline_s,
        )
        actions.append(Send(id_, command))
    return actions


def _aggregate_if_complete(job: Job, now: float) -> list[Action]:
    waiting = [id_ for id_, client in job.clients.items() if client.expected and id_ not in job.uploads]
    if waiting or job.phase is not Phase.TRAINING:
        return []
    if len(job.uploads) < job.quorum:
        return _discard(job, now, f"{len(job.uploads)} updates, {job.quorum} are needed")
    job.candidate, job.next_version = job.next_version, job.next_version + 1
    return _aggregate(job, now)


def _aggregate(job: Job, now: float) -> list[Action]:
    job.phase, job.deadline_s = Phase.AGGREGATING, now + job.rules.aggregate_s
    command = Aggregate(
        job=job.id,
        round=job.round,
        adapter=job.adapter,
        version=job.candidate,
        parent=job.version,
        clients=tuple(sorted(job.uploads)),
        strategy=job.rules.strategy,
        hyper=job.rules.hyper,
        deadline_s=job.deadline_s,
    )
    return [_announce(job, now, f"{len(job.uploads)} updates on {job.server}"), Send(job.server, command)]


def _another_server(job: Job, now: float) -> list[Action]:
    others = [id_ for id_ in job.clients if id_ != job.server]
    if not others:
        return _discard(job, now, "nobody is left to aggregate")
    job.clients[job.server].expected = False
    willing = [id_ for id_ in others if job.clients[id_].expected]
    if not willing:
        return _discard(job, now, "no client could aggregate")
    job.server = min(willing, key=lambda id_: (-job.clients[id_].quality, id_))
    return _aggregate(job, now)


def _evaluate(job: Job, now: float) -> list[Action]:
    job.phase, job.deadline_s = Phase.EVALUATING, now + job.rules.evaluate_s
    for client in job.clients.values():
        client.expected = True
    return [
        _clean(job),
        _announce(job, now, f"candidate version {job.candidate}"),
        *(Send(id_, _evaluation(job, job.candidate)) for id_ in job.clients),
    ]


def _judge_if_complete(job: Job, now: float) -> list[Action]:
    if job.phase is not Phase.EVALUATING:
        return []
    measured = job.measured.get(job.candidate, {})
    waiting = [id_ for id_, client in job.clients.items() if client.expected and id_ not in measured]
    return [] if waiting else _judge(job, now)


def _judge(job: Job, now: float) -> list[Action]:
    """The gate: publish only if held-out cross-entropy is not worse, on the same clients' same data."""
    before, after = compare(job.measured.get(job.version, {}), job.measured.get(job.candidate, {}))
    actions: list[Action] = []
    if before is None or after is None or after > before:
        job.rejected += 1
        worse = before is not None and after is not None
        verdict = f"rejected: {after:.4f} is above {before:.4f}" if worse else "rejected: nobody measured both versions"
        actions.append(Forget(job.candidate))
        actions += [Send(id_, LoadAdapter(name=job.adapter, version=job.version)) for id_ in job.clients]
    else:
        job.rejected, job.version = 0, job.candidate
        job.accepted += 1
        verdict = f"accepted: {after:.4f} after {before:.4f}"
        actions.append(Publish(job.version, before, after))
    actions += [_announce(job, now, f"version {job.candidate} {verdict}"), *_score(job), *_stop_early(job)]
    return [*actions, *_next(job, now)]


def compare(before: Mapping[str, Quality], after: Mapping[str, Quality]) -> tuple[float | None, float | None]:
    """Token-weighted mean cross-entropies over the clients that measured both; None where there are none."""
    both = sorted(before.keys() & after.keys())
    return _mean([before[id_] for id_ in both]), _mean([after[id_] for id_ in both])


def _mean(qualities: Collection[Quality]) -> float | None:
    tokens = sum(quality.tokens for quality in qualities)
    return sum(quality.cross_entropy * quality.tokens for quality in qualities) / tokens if tokens else None


def _score(job: Job) -> list[Action]:
    """Q <- Q F(t-1) / F(t), F(t) the mean training loss of round t; F(0) is the loss of where the job started."""
    loss = sum(job.uploads.values()) / len(job.uploads)
    before = job.last_loss
    if before is None:
        before = _mean(list(job.measured.get(min(job.measured), {}).values())) if job.measured else None
    job.last_loss = loss
    if before is None or loss <= 0:
        return []
    actions: list[Action] = []
    for id_ in sorted(job.uploads.keys() & job.clients.keys()):
        client = job.clients[id_]
        client.quality = min(QUALITY_BOUNDS[1], max(QUALITY_BOUNDS[0], client.quality * before / loss))
        actions.append(Score(id_, client.quality))
    return actions


def _stop_early(job: Job) -> list[Action]:
    actions: list[Action] = []
    for id_, loss in job.uploads.items():
        if (client := job.clients.get(id_)) is None:
            continue
        client.losses.append(loss)
        if should_stop(client.losses, job.rules.patience, job.rules.min_fall):
            del job.clients[id_]
            actions.append(Return(id_, ReplicaState.COMBINED, f"its loss stays at {loss:.4f}"))
    if job.clients and job.server not in job.clients:
        job.server = min(job.clients, key=lambda id_: (-job.clients[id_].quality, id_))
    return actions


def _next(job: Job, now: float) -> list[Action]:
    if not job.clients:
        return _end(job, now, Phase.DONE, "every client has stopped early")
    if job.rejected >= job.rules.max_rejected:
        return _end(job, now, Phase.DONE, f"{job.rejected} rounds in a row were rejected")
    if job.round >= job.rules.rounds:
        return _end(job, now, Phase.DONE, f"all {job.round} rounds are done")
    return _train(job, now)


def _discard(job: Job, now: float, reason: str) -> list[Action]:
    """The round gave nothing; too many of these in a row end the job."""
    job.rejected += 1
    stops = [Send(id_, StopTraining(job=job.id)) for id_ in job.clients]
    return [_clean(job), *stops, _announce(job, now, f"round discarded: {reason}"), *_next(job, now)]


def _deadline(job: Job, now: float) -> list[Action]:
    match job.phase:
        case Phase.FORMING:
            late = [id_ for id_, client in job.clients.items() if not client.joined]
            if len(job.clients) - len(late) < job.rules.min_clients:
                return _end(job, now, Phase.FAILED, f"{', '.join(late)} did not join in {job.rules.form_s:g} s")
            actions: list[Action] = []
            for id_ in late:
                del job.clients[id_]
                actions.append(Return(id_, ReplicaState.IDLE, "did not join in time"))
            return [*actions, *_train(job, now)]
        case Phase.TRAINING:
            late = [id_ for id_ in job.clients if id_ not in job.uploads]
            for id_ in late:
                job.clients[id_].expected = False
            stops: list[Action] = [Send(id_, StopTraining(job=job.id)) for id_ in late]
            return [*stops, *_aggregate_if_complete(job, now)]
        case Phase.AGGREGATING:
            return _another_server(job, now)
        case _:
            return _judge(job, now)


def _end(job: Job, now: float, phase: Phase, reason: str) -> list[Action]:
    waiting = job.phase is Phase.FORMING
    job.phase = phase
    actions: list[Action] = []
    for id_, client in job.clients.items():
        actions.append(Send(id_, StopTraining(job=job.id)))
        state = ReplicaState.IDLE if waiting and not client.joined else ReplicaState.COMBINED
        actions.append(Return(id_, state, f"job {job.id} {phase}: {reason}"))
    return [*actions, _announce(job, now, reason)]


def _clean(job: Job) -> Clean:
    return Clean(job.round, tuple(sorted(job.uploads.keys() | job.clients.keys())))


def _evaluation(job: Job, version: int) -> Evaluate:
    rules = job.rules
    return Evaluate(
        job=job.id, round=job.round, adapter=job.adapter, version=version, hyper=rules.hyper, deadline_s=job.deadline_s
    )


def _announce(job: Job, now: float, reason: str) -> Announce:
    return Announce(JobChanged(job=job.id, status=job.phase.value, round=job.round, reason=reason, time_s=now))
