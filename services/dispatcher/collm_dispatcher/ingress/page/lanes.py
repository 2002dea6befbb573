"""The state timeline: a lane a replica, put together from events."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from collm_common.messages import Event, ReplicaChanged, StateChanged
from collm_common.types import ReplicaInfo
from collm_dispatcher.ingress.page.view import Span

AWAY = "away"
GONE = ("down", "left", "restarting")
BACK = "up"


class _Lane(Struct):
    """What is known of one replica while its events are gone through."""

    state: str
    since_s: float
    away: bool = False
    spans: list[Span] = []

    @property
    def shown(self) -> str:
        return AWAY if self.away else self.state

    def until(self, time_s: float) -> None:
        """Close what has been shown so far; stretches of one state become one."""
        if time_s <= self.since_s:
            return
        if self.spans and self.spans[-1].state == self.shown:
            self.spans[-1] = Span(self.shown, self.spans[-1].from_s, time_s)
        else:
            self.spans.append(Span(self.shown, self.since_s, time_s))
        self.since_s = time_s


def lanes(infos: Iterable[ReplicaInfo], events: Iterable[Event], since_s: float, now_s: float) -> dict[str, list[Span]]:
    """For each registered replica its spans in [since_s, now_s]; `events` are oldest first."""
    own: dict[str, list[StateChanged | ReplicaChanged]] = {info.id: [] for info in infos}
    for event in events:
        if isinstance(event, StateChanged | ReplicaChanged) and event.replica in own:
            own[event.replica].append(event)
    return {info.id: _spans(info, own[info.id], since_s, now_s) for info in infos}


def _spans(info: ReplicaInfo, events: list[StateChanged | ReplicaChanged], since_s: float, now_s: float) -> list[Span]:
    first = next((event.before.value for event in events if isinstance(event, StateChanged)), info.state.value)
    lane = _Lane(first, since_s)
    for number, event in enumerate(events):
        if number == 0 and isinstance(event, ReplicaChanged) and event.what == BACK:
            lane.since_s = max(since_s, event.time_s)
        lane.until(event.time_s)
        match event:
            case StateChanged():
                lane.state = event.after.value
            case ReplicaChanged(what=what):
                lane.away = what in GONE or (lane.away and what != BACK)
    lane.away = lane.away or not info.alive
    lane.until(now_s)
    return lane.spans
