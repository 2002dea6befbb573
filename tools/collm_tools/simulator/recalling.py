"""Taking training back and giving it back, as the live `recalling.py` carries it out, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from collm_common.types import ReplicaState
from collm_dispatcher.policy.outlook import Fit
from collm_dispatcher.policy.recall import Steps
from collm_dispatcher.policy.streams import Stream
from collm_tools.simulator.scheduling import Moves, Resize, View


class Recalling:
    """Remembers the sizes from before the first step."""

    def __init__(self, replicas: Mapping[str, View]) -> None:
        self._replicas = replicas
        self._before: dict[str, Resize] = {}

    def apply(self, steps: Steps, fits: Mapping[str, Fit], stream: Stream | None, moves: Moves) -> None:
        """Add to the moves what the steps come to; `stream` is the one that b is made for."""
        self._before = {
            id_: sizes
            for id_, sizes in self._before.items()
            if self._replicas[id_].state is ReplicaState.COMBINED or id_ in steps.stop
        }
        resize: list[Resize] = []
        for id_ in steps.shrink:
            half = max(1, self._keep(id_).train // 2)
            resize.append(Resize(id_, half, self._most(id_, fits, stream, half), paused=False))
        for id_ in steps.pause:
            self._keep(id_)
            train = self._replicas[id_].train
            resize.append(Resize(id_, train, self._most(id_, fits, stream, 0), paused=True))
        for id_ in steps.resume:
            replica = self._replicas[id_]
            whole = self._before.pop(id_, Resize(id_, replica.train, replica.b, paused=False))
            # A client whose round has ended meanwhile gets its sizes with the next one; one that was between two rounds
            # when it was paused has no other B than that of its round now.
            resize.append(structs.replace(whole, train=(whole.train or replica.train) if replica.train else 0))
        for id_ in steps.stop:
            self._before.pop(id_, None)
        moves.resize, moves.stop = resize, steps.stop

    def _keep(self, id_: str) -> Resize:
        replica = self._replicas[id_]
        return self._before.setdefault(id_, Resize(id_, replica.train, replica.b, paused=False))

    def _most(self, id_: str, fits: Mapping[str, Fit], stream: Stream | None, train_batch: int) -> int:
        """b beside `train_batch`: by the fit; without one, all that the engine can do once nothing is trained."""
        replica, fit = self._replicas[id_], fits[id_]
        if stream is not None and fit.model is not None:
            freed = structs.replace(fit, most=replica.most, train_batch=train_batch)
            return max(fit.most, freed.mode(stream).b)
        return fit.most if train_batch else replica.most
