"""The phases of a round, each begun by the end of the one before (paper section 4)."""

from __future__ import annotations

from collections.abc import Mapping

from collm_common.messages import Aggregate, Evaluate, JobChanged, LoadAdapter, StopTraining, TrainRound
from collm_common.types import BatchSizes, ReplicaState
from collm_launcher.policy.canary import regression
from collm_launcher.policy.gate import compare, passes, score, stop_early
from collm_launcher.policy.job import Action, Announce, Clean, Forget, Job, Phase, Publish, Return, Send, Trial

FIRST_SIZES = BatchSizes(train=1, infer=1)


def train_if_formed(job: Job, now: float) -> list[Action]:
    """Begin once all have joined; too few to start end the job."""
    if len(job.clients) < job.rules.min_clients:
        return give_up(job, now, f"{len(job.clients)} clients, {job.rules.min_clients} are needed to start")
    return train(job, now) if all(client.joined for client in job.clients.values()) else []


def give_up(job: Job, now: float, reason: str) -> list[Action]:
    """Too few are left; what was accepted before counts."""
    return end(job, now, Phase.DONE if job.accepted else Phase.FAILED, reason)


def train(job: Job, now: float) -> list[Action]:
    """The next round; in the first one every client also measures where the job starts."""
    rules = job.rules
    job.round += 1
    job.phase, job.deadline_s = Phase.TRAINING, now + rules.train_s
    job.uploads = {}
    actions: list[Action] = [announce(job, now, f"{len(job.clients)} clients from version {job.version}")]
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
            first_step=(job.turn - 1) * rules.steps,
            total_steps=rules.rounds * rules.steps,
            hyper=rules.hyper.at_rank(client.rank),
            seed=job.seed,
            upload_by_s=now + rules.upload_share * rules.train_s,
            deadline_s=job.deadline_s,
        )
        actions.append(Send(id_, command))
    return actions


def aggregate_if_complete(job: Job, now: float) -> list[Action]:
    """Go on once every update that can be expected is there."""
    waiting = [id_ for id_, client in job.clients.items() if client.expected and id_ not in job.uploads]
    if waiting or job.phase is not Phase.TRAINING:
        return []
    if len(job.uploads) < job.quorum:
        return discard(job, now, f"{len(job.uploads)} updates, {job.quorum} are needed")
    return aggregate(job, now)


def aggregate(job: Job, now: float) -> list[Action]:
    """Have the server combine what was uploaded; every attempt has a version of its own, as two may write at once."""
    job.candidate, job.next_version = job.next_version, job.next_version + 1
    job.phase, job.deadline_s = Phase.AGGREGATING, now + job.rules.aggregate_s
    command = Aggregate(
        job=job.id,
        round=job.round,
        adapter=job.adapter,
        version=job.candidate,
        parent=job.version,
        clients=tuple(sorted(job.uploads)),
        steps=job.rules.steps,
        strategy=job.rules.strategy,
        rates=job.rules.rates,
        seed=job.seed,
        hyper=job.rules.hyper,
        deadline_s=job.deadline_s,
    )
    return [announce(job, now, f"{len(job.uploads)} updates on {job.server}"), Send(job.server, command)]


def aggregated(job: Job, now: float, refused: Mapping[str, str], residual: float) -> list[Action]:
    """Updates that the server refused do not count: the round goes on with the rest, if it is a quorum."""
    said: list[Action] = []
    for id_, reason in sorted(refused.items()):
        if job.uploads.pop(id_, None) is not None:
            said.append(announce(job, now, f"the update of {id_} is refused: {reason}"))
    if len(job.uploads) < job.quorum:
        return [*said, *discard(job, now, f"{len(job.uploads)} updates could be used, {job.quorum} are needed")]
    return [*said, *evaluate(job, now, residual)]


def another_server(job: Job, now: float) -> list[Action]:
    """The server cannot: ask the next best client that has not failed yet."""
    others = [id_ for id_ in job.clients if id_ != job.server]
    if not others:
        return discard(job, now, "nobody is left to aggregate")
    job.clients[job.server].expected = False
    willing = [id_ for id_ in others if job.clients[id_].expected]
    if not willing:
        return discard(job, now, "no client could aggregate")
    job.server = min(willing, key=lambda id_: (-job.clients[id_].quality, id_))
    return aggregate_again(job, now)


def aggregate_again(job: Job, now: float) -> list[Action]:
    """On the new server, whatever the old one may still do."""
    return [abandon(job), *aggregate(job, now)]


def abandon(job: Job) -> Action:
    """Nobody waits for the candidate any more; should its server finish it yet, it is removed then."""
    job.abandoned.append(job.candidate)
    return Forget(job.candidate)


def evaluate(job: Job, now: float, residual: float) -> list[Action]:
    """Have every client measure the candidate on its own data."""
    job.phase, job.deadline_s = Phase.EVALUATING, now + job.rules.evaluate_s
    for client in job.clients.values():
        client.expected = True
    return [
        clean(job),
        announce(job, now, f"candidate version {job.candidate}, residual {residual:.3f}"),
        *(Send(id_, _evaluation(job, job.candidate)) for id_ in job.clients),
    ]


def judge_if_complete(job: Job, now: float) -> list[Action]:
    """Go on once every measurement that can be expected is there."""
    if job.phase is not Phase.EVALUATING:
        return []
    measured = job.measured.get(job.candidate, {})
    waiting = [id_ for id_, client in job.clients.items() if client.expected and id_ not in measured]
    return [] if waiting else judge(job, now)


def judge(job: Job, now: float) -> list[Action]:
    """The gate: go on only if held-out cross-entropy is not worse, on the same clients' same data."""
    before, after = _compared(job)
    if before is None or after is None:
        return reject(job, now, "nobody measured both versions")
    if not passes(before, after):
        return reject(job, now, f"{after:.4f} after {before:.4f}")
    return begin_canary(job, now) if job.rules.canary_s else accept(job, now)


def begin_canary(job: Job, now: float) -> list[Action]:
    """The server alone takes the candidate into service, for the requests that it gets."""
    job.phase, job.deadline_s, job.trial = Phase.CANARY, now + job.rules.canary_s, Trial()
    said = announce(job, now, f"version {job.candidate} serves on {job.server} for {job.rules.canary_s:g} s")
    return [Send(job.server, LoadAdapter(name=job.adapter, version=job.candidate)), said]


def end_canary(job: Job, now: float) -> list[Action]:
    """Publish, unless the requests said otherwise."""
    found = regression(job.trial, job.rules)
    return accept(job, now) if found is None else reject(job, now, f"in service {found}")


def accept(job: Job, now: float) -> list[Action]:
    """Publish the candidate."""
    before, after = _compared(job)
    assert before is not None
    assert after is not None
    publish = Publish(job.candidate, before, after, job.version)
    job.rejected, job.version = 0, job.candidate
    job.accepted += 1
    return _close(job, now, before, [publish], f"accepted: {after:.4f} after {before:.4f}")


def reject(job: Job, now: float, why: str) -> list[Action]:
    """Everybody goes back to the last accepted version."""
    before, _ = _compared(job)
    job.rejected += 1
    return _close(job, now, before, [Forget(job.candidate), *take_back(job)], f"rejected: {why}")


def _compared(job: Job) -> tuple[float | None, float | None]:
    return compare(job.measured.get(job.version, {}), job.measured.get(job.candidate, {}))


def _close(job: Job, now: float, before: float | None, actions: list[Action], verdict: str) -> list[Action]:
    said = announce(job, now, f"version {job.candidate} {verdict}")
    return [*actions, said, *score(job, before), *stop_early(job), *_next(job, now)]


def _next(job: Job, now: float) -> list[Action]:
    if not job.clients:
        return end(job, now, Phase.DONE, "every client has stopped early")
    if job.rejected >= job.rules.max_rejected:
        return end(job, now, Phase.DONE, f"{job.rejected} rounds in a row were rejected")
    if job.turn >= job.rules.rounds:
        return end(job, now, Phase.DONE, f"all {job.turn} rounds are done")
    return train(job, now)


def discard(job: Job, now: float, reason: str) -> list[Action]:
    """The round gave nothing; too many of these in a row end the job."""
    job.rejected += 1
    leftovers: list[Action] = [clean(job)]
    if job.phase is Phase.AGGREGATING:
        leftovers.append(abandon(job))
    stops = [Send(id_, StopTraining(job=job.id)) for id_ in job.clients]
    said = announce(job, now, f"round discarded: {reason}")
    return [*leftovers, *stops, *take_back(job), said, *_next(job, now)]


def rolled_back(job: Job, now: float, version: int, reason: str) -> list[Action]:
    """An operator took another version: what the clients train was made of one that nobody wants."""
    leftovers = drop_round(job)
    job.version = version
    ended = end(job, now, Phase.DONE, f"rolled back to version {version}: {reason}")
    return [*leftovers, *ended, *take_back(job)]


def take_back(job: Job) -> list[Action]:
    """The clients' own snapshots of a round that came to nothing give way to the last accepted version."""
    return [Send(id_, LoadAdapter(name=job.adapter, version=job.version)) for id_ in job.clients]


def end(job: Job, now: float, phase: Phase, reason: str) -> list[Action]:
    """Let every client go."""
    waiting = job.phase is Phase.FORMING
    job.phase = phase
    actions: list[Action] = []
    for id_, client in job.clients.items():
        actions.append(Send(id_, StopTraining(job=job.id)))
        state = ReplicaState.IDLE if waiting and not client.joined else ReplicaState.COMBINED
        actions.append(Return(id_, state, f"job {job.id} {phase}: {reason}"))
    return [*actions, announce(job, now, reason)]


def drop_round(job: Job) -> list[Action]:
    """Nothing of the round is wanted any more: neither updates nor a candidate."""
    return [clean(job), abandon(job)] if job.has_candidate else [clean(job)]


def clean(job: Job) -> Clean:
    """The updates of the round, whoever may have uploaded one."""
    return Clean(job.round, tuple(sorted(job.uploads.keys() | job.clients.keys())))


def _evaluation(job: Job, version: int) -> Evaluate:
    rules = job.rules
    return Evaluate(
        job=job.id, round=job.round, adapter=job.adapter, version=version, hyper=rules.hyper, deadline_s=job.deadline_s
    )


def announce(job: Job, now: float, reason: str) -> Announce:
    """The job's status, for all to see."""
    return Announce(JobChanged(job=job.id, status=job.phase.value, round=job.round, reason=reason, time_s=now))
