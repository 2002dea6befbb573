"""The latency laws of one replica, one for each SM share, from its own samples and those of its peers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from collm_common.latency import LatencyModel, Line
from collm_coordinator.latency_fit import Refusal, fit, proportional
from collm_coordinator.samples import Grid, Keep, Point, alone, beside, pooled


class Measured(Struct, frozen=True):
    """What one replica measured: engine iterations, and training micro-steps."""

    infer: Grid
    train: Grid


class Shape(Struct, frozen=True):
    """What its requests cost beyond iterations: seconds of prefill a prompt token, tokens of an answer."""

    prefill_s_per_token: float = 0.0
    output_tokens: float = 1.0


def fit_laws(
    own: Measured, peers: Collection[Measured], shape: Shape, before: Mapping[float, LatencyModel]
) -> dict[float, LatencyModel] | Refusal:
    """A model for every SM share that it or a peer measured; for share 1 alone while nobody trained.

    `peers` are replicas with the same weights on equal hardware, this one among them: they tell what its own samples
    cannot. A part that cannot be fitted is what it was `before`.
    """
    known = next(iter(before.values()), None)
    quiet = _fit(own.infer, [peer.infer for peer in peers], alone, known.alone if known else None)
    alone_line = quiet if isinstance(quiet, Line) else (known.alone if known else None)
    laws: dict[float, LatencyModel] = {}
    refusal = quiet if isinstance(quiet, Refusal) else None
    for share in sorted({share for peer in peers for share in peer.infer.shares() | peer.train.shares()}):
        infer = _beside(own, peers, share, alone_line, before.get(share))
        if isinstance(infer, Refusal):
            refusal = infer
            continue
        train = _training(own, peers, share, before.get(share))
        laws[share] = LatencyModel(infer, train, shape.prefill_s_per_token, shape.output_tokens, alone_line, share)
    if not laws and alone_line is not None:
        laws[1.0] = LatencyModel(alone_line, None, shape.prefill_s_per_token, shape.output_tokens, alone_line)
    return laws or refusal or Refusal("nothing was measured")


def _beside(
    own: Measured, peers: Collection[Measured], share: float, quiet: Line | None, before: LatencyModel | None
) -> Line | Refusal:
    """T_infer beside training. While B was always the same, iterations without training are the other end.

    What training costs at all counts as the slope of B then, which errs on the careful side.
    """
    keep = beside(share)
    known = before.infer if before is not None and before.train is not None else None
    line = _fit(own.infer, [peer.infer for peer in peers], keep, known)
    if isinstance(line, Line) and line.train_identified:
        return line
    joint = fit([*own.infer.points(keep), *own.infer.points(alone)], known)
    if isinstance(joint, Line) and (joint.train_identified or isinstance(line, Refusal)):
        return joint
    return quiet if isinstance(line, Refusal) and quiet is not None else line


def _training(own: Measured, peers: Collection[Measured], share: float, before: LatencyModel | None) -> Line | None:
    """T_train; None while nothing was trained at this share."""
    keep, known = beside(share), before.train if before else None
    line = _fit(own.train, [peer.train for peer in peers], keep, known)
    if isinstance(line, Line):
        return line
    guess = known or proportional(own.train.points(keep) or pooled((peer.train for peer in peers), keep))
    return guess if isinstance(guess, Line) else None


def _fit(own: Grid, peers: Collection[Grid], keep: Keep, before: Line | None) -> Line | Refusal:
    """From its own points; slopes they cannot tell come from the points of all, or else from the fit before."""
    points: list[Point] = own.points(keep)
    line = fit(points, before)
    if isinstance(line, Line) and line.sequence_identified and (line.train_identified or keep is alone):
        return line
    shared = fit(pooled(peers, keep), before)
    if isinstance(shared, Refusal):
        return line
    refined = fit(points, shared)
    return shared if isinstance(refined, Refusal) else refined
