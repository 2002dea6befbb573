"""A job's actions as the commands of one Redis transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from collm_common import post
from collm_common.keys import Keys
from collm_common.lineage import Turn, queue_turn
from collm_common.messages import AdapterPublished, Aggregate, Control, LoadAdapter
from collm_common.registry import transition_call
from collm_common.scripts import TRANSITION
from collm_common.types import ReplicaState
from collm_launcher.policy.job import Action, Announce, Clean, Forget, Job, Publish, Return, Score, Send

KEEP_ENDED_S = 24 * 3600
UNWANT = """
-- KEYS: wanted. ARGV: adapter, job. A newer job of the same adapter stays wanted.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


class Stored(Struct, frozen=True):
    """An adapter's versions that were current and are still there, oldest first; the last `keep` of them stay."""

    current: int
    published: Sequence[int]
    keep: int


class Transaction:
    """Queues commands on `pipe`, which its owner executes. `replicas` are all of the job's model."""

    def __init__(
        self,
        pipe: Any,
        keys: Keys,
        job: Job,
        replicas: Collection[str],
        stored: Stored,
        now: float,
    ) -> None:
        self._pipe, self._keys, self._job, self._replicas = pipe, keys, job, replicas
        self._stored, self._now = stored, now

    def add(self, action: Action) -> None:
        """One action."""
        match action:
            case Send(replica, command):
                self._command(replica, command)
                if isinstance(command, Aggregate):
                    self._pipe.hset(self._keys.adapter(self._job.adapter), "last", command.version)
            case Announce(event):
                post.queue_event(self._pipe, self._keys, event, self._job.id)
            case Return(replica, before, reason):
                self._return(replica, before, reason)
            case Score(replica, quality):
                self._pipe.hset(self._keys.replica(replica), "quality", quality)
            case Clean(round_, clients):
                for client in clients:
                    self._pipe.unlink(self._keys.update(self._job.id, round_, client))
            case Forget(version):
                self._forget(version)
            case Publish():
                self._publish(action)

    def write_state(self, position: str) -> None:
        """The whole state, with readable fields beside it; `position` is the last event it has seen."""
        job, key = self._job, self._keys.job(self._job.id)
        readable = {
            "status": job.phase.value,
            "round": job.round,
            "model": job.model,
            "adapter": job.adapter,
            "version": job.version,
            "server": job.server,
            "clients": ",".join(job.clients),
            "accepted": job.accepted,
            "accumulation": job.rules.hyper.accumulation,
        }
        self._pipe.hset(key, mapping={**readable, "position": position, "state": msgspec.msgpack.encode(job)})
        if job.ended:
            self._pipe.srem(self._keys.jobs, job.id)
            self._pipe.srem(self._keys.paused, job.id)
            if job.wanted:
                self._pipe.eval(UNWANT, 1, self._keys.wanted(job.model), job.adapter, job.id)
            self._pipe.expire(key, KEEP_ENDED_S)
            self._pipe.unlink(self._keys.server_state(job.id, job.version))
            self._pipe.hset(self._keys.adapter(job.adapter), "trained_s", self._now)
            return
        self._pipe.sadd(self._keys.jobs, job.id)
        for id_ in job.clients:
            self._pipe.hset(self._keys.replica(id_), "job", job.id)

    def _command(self, replica: str, command: Control) -> None:
        post.queue_command(self._pipe, self._keys, replica, command, self._job.id)

    def _return(self, replica: str, before: ReplicaState, reason: str) -> None:
        keys, args = transition_call(self._keys, replica, before, ReplicaState.SERVING, reason, self._now)
        self._pipe.hset(self._keys.replica(replica), "job", "")
        self._pipe.eval(TRANSITION, len(keys), *keys, *args)

    def _forget(self, version: int) -> None:
        self._pipe.unlink(self._keys.adapter_version(self._job.adapter, version))
        self._pipe.unlink(self._keys.server_state(self._job.id, version))

    def _publish(self, action: Publish) -> None:
        """The version stays from now on; without it nobody's, it expires."""
        name, version, stored = self._job.adapter, action.version, self._stored
        if stored.current != action.parent:
            self._forget(version)
            return
        published = [*stored.published, version]
        self._pipe.unlink(self._keys.server_state(self._job.id, stored.current))
        for old in published[: -stored.keep]:
            self._pipe.unlink(self._keys.adapter_version(name, old))
        kept = ",".join(map(str, published[-stored.keep :]))
        self._pipe.persist(self._keys.adapter_version(name, version))
        self._pipe.hset(self._keys.adapter(name), mapping={"version": version, "published": kept})
        for id_ in self._replicas:
            self._command(id_, LoadAdapter(name=name, version=version))
        job, now = self._job, self._now
        turn = Turn(version, stored.current, now, job.id, job.round, action.before, action.after)
        queue_turn(self._pipe, self._keys, name, turn)
        event = AdapterPublished(name=name, version=version, before=action.before, after=action.after, time_s=now)
        post.queue_event(self._pipe, self._keys, event, name)
