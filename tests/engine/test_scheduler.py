"""Properties of the plans, without a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from collm_replica.engine.kv import BlockPool
from collm_replica.engine.output import Output
from collm_replica.engine.scheduler import Plan, Scheduler
from collm_replica.engine.sequence import Sequence, Timings
from tests.engine.harness import request


def sequence(order: int, prompt: int, answer: int = 4, deadline_s: float = 1.0) -> Sequence:
    asked = request(str(order), [1] * prompt, answer, deadline_s=deadline_s)
    return Sequence(asked, order, Output(asked.sampling, frozenset(), lambda tokens: "", ()), Timings(0.0))


def settle(scheduler: Scheduler, plan: Plan) -> list[Sequence]:
    """Do what a model would: every chunk is computed, its last token chosen. Returns those that are complete."""
    done = []
    for chunk in plan.chunks:
        chunk.sequence.computed = chunk.end
        if chunk.samples:
            chunk.sequence.output.push(2)
            chunk.sequence.tokens.append(2)
            if chunk.sequence.output.finish:
                scheduler.remove(chunk.sequence)
                done.append(chunk.sequence)
    return done


@given(
    shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.floats(0, 9)), min_size=1, max_size=12),
    step_tokens=st.integers(4, 40),
    limits=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    blocks=st.integers(18, 60),
)
def test_every_sequence_ends_within_all_bounds(
    shapes: list[tuple[int, int, float]], step_tokens: int, limits: list[int], blocks: int
) -> None:
    """Catches starvation, livelock by preemption, a step over its budget, a batch over its limit, and lost blocks."""
    pool = BlockPool(blocks, 3)
    scheduler = Scheduler(pool, step_tokens, limits[0])
    for order, (prompt, answer, deadline_s) in enumerate(shapes):
        scheduler.add(sequence(order, prompt, answer, deadline_s))
    done: list[Sequence] = []
    for step in range(20_000):
        if len(done) == len(shapes):
            break
        before = len(scheduler.running)
        scheduler.limit = limits[step % len(limits)]
        plan = scheduler.schedule()
        assert plan.chunks
        assert sum(chunk.count for chunk in plan.chunks) <= step_tokens
        assert len({id(chunk.sequence) for chunk in plan.chunks}) == len(plan.chunks)
        assert len(scheduler.running) <= max(before, scheduler.limit)
        for chunk in plan.chunks:
            assert chunk.sequence in scheduler.running
            assert len(chunk.sequence.blocks) >= pool.needed(chunk.end)
        done += settle(scheduler, plan)
    assert len(done) == len(shapes)
    assert pool.free == blocks - 1


def test_the_earliest_deadline_is_admitted_first() -> None:
    """Catches first come first served."""
    scheduler = Scheduler(BlockPool(100, 4), 64, 2)
    for order, deadline_s in enumerate((5.0, 3.0, 9.0, 3.0)):
        scheduler.add(sequence(order, 4, deadline_s=deadline_s))
    assert [each.order for each in scheduler.schedule().admitted] == [1, 3]


def test_decodes_run_beside_a_long_prompt() -> None:
    """Catches a prompt that stops everybody else's answer."""
    scheduler = Scheduler(BlockPool(100, 4), 8, 4)
    scheduler.add(sequence(0, 3))
    settle(scheduler, scheduler.schedule())
    scheduler.add(sequence(1, 50))
    plan = scheduler.schedule()
    assert [(chunk.sequence.order, chunk.count, chunk.decode) for chunk in plan.chunks] == [(0, 1, True), (1, 7, False)]


def test_the_youngest_is_preempted() -> None:
    """Catches progress of the oldest that depends on the youngest."""
    scheduler = Scheduler(BlockPool(7, 2), 16, 3)
    for order in range(3):
        scheduler.add(sequence(order, 4, 8))
    plan = Plan()
    while not plan.preempted:
        settle(scheduler, plan)
        plan = scheduler.schedule()
    assert [each.order for each in plan.preempted] == [2]
    assert not plan.preempted[0].blocks
    assert plan.preempted[0].computed == 0
    assert [chunk.sequence.order for chunk in plan.chunks] == [0, 1]


def test_a_lower_limit_throws_nobody_out() -> None:
    """Catches running sequences lost when b shrinks, and admissions above the new b."""
    scheduler = Scheduler(BlockPool(100, 4), 64, 3)
    for order in range(4):
        scheduler.add(sequence(order, 4))
    settle(scheduler, scheduler.schedule())
    scheduler.limit = 1
    plan = scheduler.schedule()
    assert [chunk.sequence.order for chunk in plan.chunks] == [0, 1, 2]
    assert not plan.admitted
