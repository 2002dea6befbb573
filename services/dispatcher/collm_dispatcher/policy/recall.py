"""Taking capacity back from training in steps (a smaller B, a pause, the end) and giving it back slowly."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from msgspec import Struct

from collm_dispatcher.policy.fill import Carrier


class Level(IntEnum):
    """How much of a Combined replica's training has been taken back; the last one makes it Serving."""

    FULL = 0
    SMALLER = 1
    PAUSED = 2
    STOPPED = 3


class Steps(Struct, frozen=True):
    """What changes for which Combined replicas; read by the loop, which carries it out."""

    shrink: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()


class Patience(Struct, frozen=True):
    """In ticks: how long overload lasts before a step, how long a pause before it is the end, how long calm."""

    step: int = 2
    stop: int = 40
    resume: int = 10


class Recall:
    """Remembers how long overload and calm have lasted, and how far each replica has been taken back.

    A replica it knows nothing of yet counts as perhaps paused by an earlier leader, so calm resumes it once. A load
    that swings faster than `resume` is answered once, by what its peaks need; a slower one once a swing.
    """

    def __init__(self, patience: Patience | None = None) -> None:
        self.patience = patience or Patience()
        self._levels: dict[str, Level] = {}
        self._paused_at: dict[str, int] = {}
        self._over = self._calm = self._now = 0

    def level(self, replica: str) -> Level:
        """How far a replica has been taken back."""
        return self._levels.get(replica, Level.FULL)

    def tick(self, combined: Sequence[Carrier], missing: float, calm: bool) -> Steps:
        """`combined`: by preference; `missing`: the replicas' worth of capacity that nobody has; `calm`: no need."""
        self._now += 1
        ids = [replica.id for replica in combined]
        self._levels = {id_: self._levels[id_] for id_ in ids if id_ in self._levels}
        self._over = self._over + 1 if missing > 0 else 0
        self._calm = self._calm + 1 if calm and missing <= 0 else 0
        if self._over >= self.patience.step:
            return self._take(combined, missing)
        if self._calm >= self.patience.resume:
            return self._give_back(ids)
        return Steps()

    def _take(self, combined: Sequence[Carrier], missing: float) -> Steps:
        """One step further for the fewest replicas whose training covers what is missing, the least preferred first."""
        changed: dict[str, Level] = {}
        for replica in reversed(combined):
            if missing <= 0:
                break
            if (level := self._next(replica)) is not None:
                changed[replica.id] = level
                missing -= _gain(replica)
        self._levels |= changed
        self._paused_at |= {id_: self._now for id_, level in changed.items() if level is Level.PAUSED}
        if changed:
            self._over = 0
        return Steps(*(_at(changed, level) for level in (Level.SMALLER, Level.PAUSED, Level.STOPPED)))

    def _next(self, replica: Carrier) -> Level | None:
        match self.level(replica.id):
            case Level.FULL if replica.train_batch > 1:
                return Level.SMALLER
            case Level.FULL | Level.SMALLER:
                return Level.PAUSED
            case Level.PAUSED if self._now - self._paused_at[replica.id] >= self.patience.stop:
                return Level.STOPPED
        return None

    def _give_back(self, ids: Sequence[str]) -> Steps:
        resumed = tuple(id_ for id_ in ids if self._levels.get(id_) is not Level.FULL)
        self._levels |= dict.fromkeys(resumed, Level.FULL)
        return Steps(resume=resumed)


def _gain(replica: Carrier) -> float:
    """What its training costs, as a share of the pace it has now; nothing if that is not known."""
    alone, now = replica.alone.rate if replica.alone else None, replica.mode.rate
    return max(0.0, alone / now - 1) if alone and now else 0.0


def _at(changed: dict[str, Level], wanted: Level) -> tuple[str, ...]:
    return tuple(id_ for id_, level in changed.items() if level is wanted)
