"""Which of the replicas that train carry how much of the load: those whose training loses least by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collm_coordinator.solver import Choice


def split(options: Mapping[str, Sequence[Choice]], needed: float) -> dict[str, float]:
    """The rate (1/s) that each must carry, so that all together carry `needed`.

    Everybody starts at its best goodput, which is weighted by the fall of its loss; while the load is not carried, the
    step that costs the least goodput for each request a second more is taken. What nobody can carry is left over.
    """
    chosen = {id_: max(own, key=lambda choice: (choice.goodput, choice.rate)) for id_, own in options.items() if own}
    while sum(choice.rate for choice in chosen.values()) < needed:
        steps = [
            ((chosen[id_].goodput - choice.goodput) / (choice.rate - chosen[id_].rate), id_, choice)
            for id_ in chosen
            for choice in options[id_]
            if choice.rate > chosen[id_].rate
        ]
        if not steps:
            break
        _, id_, choice = min(steps, key=lambda step: step[:2])
        chosen[id_] = choice
    return {id_: choice.rate for id_, choice in chosen.items()}
