"""Training that the dispatcher takes back and gives back, in virtual time."""

from __future__ import annotations

from collm_common.types import ReplicaState
from collm_dispatcher.policy.outlook import Fit
from collm_dispatcher.policy.recall import Steps
from collm_tools.simulator.recalling import Recalling
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.scheduling import Moves, Resize
from tests.simulator.support import replicas


def combined(train: int) -> Replica:
    """A replica that trains with this B."""
    (replica,) = replicas(1)
    replica.state = ReplicaState.COMBINED
    replica.configure(0.0, 4, train)
    return replica


def told(recalling: Recalling, steps: Steps) -> list[Resize]:
    """What the steps come to."""
    moves = Moves()
    recalling.apply(steps, {"r0": Fit(None, 8)}, None, moves)
    return [*moves.resize]


def test_who_was_paused_between_two_rounds_trains_in_the_next_one() -> None:
    """The B of no round at all given back in the middle of one: nobody trains until the round's deadline."""
    replica = combined(0)
    recalling = Recalling({"r0": replica})
    told(recalling, Steps(pause=("r0",)))
    replica.configure(1.0, 4, 2)
    assert told(recalling, Steps(resume=("r0",))) == [Resize("r0", 2, 4, paused=False)]


def test_sizes_of_an_earlier_job_are_not_given_to_a_later_one() -> None:
    """A replica that went back to serving while paused, and trains with its old B when it comes to the next job."""
    replica = combined(8)
    recalling = Recalling({"r0": replica})
    told(recalling, Steps(pause=("r0",)))
    replica.state = ReplicaState.SERVING
    told(recalling, Steps())
    replica.state = ReplicaState.COMBINED
    replica.configure(2.0, 4, 3)
    assert told(recalling, Steps(resume=("r0",))) == [Resize("r0", 3, 4, paused=False)]
