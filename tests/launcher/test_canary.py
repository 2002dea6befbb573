"""A candidate that serves some of the requests before all get it."""

from __future__ import annotations

import msgspec
import pytest
from redis.asyncio import Redis

from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import InferenceReport, JobChanged, LoadAdapter, Scored
from collm_common.types import AdapterRef, Quality, ReplicaState
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from collm_launcher.policy.canary import hear
from collm_launcher.policy.job import Action, Forget, Job, Phase, Publish, Send
from collm_launcher.policy.rounds import cancel
from collm_launcher.service import Launcher
from tests.launcher.support import ADAPTER, RULES, SimReplica, events, replicas, running, settings
from tests.launcher.test_rounds import RULES as POLICY_RULES
from tests.launcher.test_rounds import Driver, said
from tests.support.waiting import eventually

CANARY = msgspec.structs.replace(POLICY_RULES, canary_s=60.0)


def scored(version: str, entropy: float, tokens: int = 300, name: str = "desk") -> Scored:
    return Scored(AdapterRef(name, version), Quality(entropy, tokens))


def on_trial() -> Driver:
    """A candidate that passed the gate: version 1, on server r2."""
    driver = Driver(CANARY)
    driver.join()
    driver.round(after=2.0, before=3.0)
    assert driver.job.phase is Phase.CANARY
    return driver


def loads(actions: list[Action]) -> dict[str, int]:
    return {a.replica: a.command.version for a in actions if isinstance(a, Send) and isinstance(a.command, LoadAdapter)}


def test_the_server_alone_serves_a_candidate_until_it_is_published() -> None:
    """A version that everybody gets at once, or that is never published."""
    driver = on_trial()
    assert loads(driver.actions) == {"r2": 1}
    assert not [action for action in driver.actions if isinstance(action, Publish)]
    hear(driver.job, [scored("1", 2.0), scored("0", 3.0), scored("1", 50.0, name="another")])
    assert driver.tick(59.0) == []
    actions = driver.tick(1.0)
    assert [action.version for action in actions if isinstance(action, Publish)] == [1]
    assert (driver.job.phase, driver.job.version) == (Phase.TRAINING, 1)


@pytest.mark.parametrize(
    ("new", "old", "taken"),
    [
        (scored("1", 4.0), scored("0.4", 3.0), False),
        (scored("1", 3.2), scored("0.4", 3.0), True),
        (scored("1", 4.0, tokens=50), scored("0.4", 3.0), True),
        (scored("1", 4.0), scored("0.4", 3.0, tokens=0), True),
    ],
    ids=["worse", "within the slack", "too little was asked of it", "nothing to compare with"],
)
def test_requests_can_reject_what_passed_the_gate(new: Scored, old: Scored, taken: bool) -> None:
    """A regression that only live requests show, or noise that rejects every candidate."""
    driver = on_trial()
    hear(driver.job, [new])
    hear(driver.job, [old])
    actions = driver.tick(60.0)
    assert bool([action for action in actions if isinstance(action, Publish)]) is taken
    assert bool([action for action in actions if isinstance(action, Forget)]) is not taken
    if not taken:
        assert loads(actions) == dict.fromkeys(("r1", "r2", "r3"), 0)
        assert driver.job.rejected == 1
        assert "version 1 rejected: in service 4.0000 where the others have 3.0000" in said(actions)[0]


def test_a_server_that_leaves_goes_back_and_another_takes_the_candidate() -> None:
    """A recalled replica that serves a version nobody published for as long as it lives."""
    driver = on_trial()
    actions = driver.state("r2", ReplicaState.COMBINED, ReplicaState.SERVING)
    assert loads(actions) == {"r2": 0, "r3": 1}
    assert driver.job.phase is Phase.CANARY


def test_a_job_that_is_cancelled_takes_its_candidate_back() -> None:
    """The same, when the client gives the job up."""
    driver = on_trial()
    assert loads(cancel(driver.job, 0.0))["r2"] == 0


async def test_live_reports_reject_a_candidate_and_all_go_back(redis: Redis, keys: Keys) -> None:
    """Scores that nobody hears, or a rejected version that stays in service."""
    rules = msgspec.structs.replace(RULES, canary_s=0.5, max_rejected=1)
    launcher = Launcher(settings(rules=rules), redis, SystemClock())
    coordinator = Coordinator(CoordinatorSettings(), redis, SystemClock())
    async with replicas(redis, keys) as members, running(launcher, coordinator):
        await eventually(lambda: any(job.phase is Phase.CANARY for job in launcher.jobs.values()))
        (job,) = launcher.jobs.values()
        await members[0].measured(_report(members[0], job, 9.0))
        await members[1].measured(_report(members[1], None, 1.0))
        await eventually(lambda: not launcher.jobs)
        await eventually(lambda: all(_loaded(member)[-1:] == [0] for member in members))
        assert _loaded(members[0]) == [1, 0]
        assert await redis.hget(keys.adapter(ADAPTER), "version") == b"0"
        assert not await redis.exists(keys.adapter_version(ADAPTER, 1))
    told = [event.reason for event in await events(redis, keys) if isinstance(event, JobChanged)]
    assert any("rejected: in service 9.0000" in reason for reason in told)


def _loaded(member: SimReplica) -> list[int]:
    return [message.version for message in member.told(LoadAdapter) if isinstance(message, LoadAdapter)]


def _report(member: SimReplica, job: Job | None, entropy: float) -> InferenceReport:
    version = str(job.candidate) if job is not None else "0"
    return InferenceReport(
        replica=member.id,
        state=ReplicaState.COMBINED,
        time_s=0.0,
        utilisation=0,
        memory_bytes=0,
        queue=0,
        running=0,
        mean_batch=0,
        limit=8,
        train_batch=0,
        scored=(scored(version, entropy, name=ADAPTER),),
    )
