"""Draws and log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import SamplingParams
from collm_replica.engine.sampler import Draw, choose, logprob

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])


def draws(count: int, **params: float) -> list[int]:
    """`count` draws from LOGITS, one a position."""
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 7} | params)  # type: ignore[arg-type]
    return choose(LOGITS.repeat(count, 1), [Draw(sampling, position) for position in range(count)]).tolist()


def shares(tokens: list[int]) -> list[float]:
    return [tokens.count(token) / len(tokens) for token in range(len(LOGITS))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}])
def test_frequencies_are_those_of_the_softmax(temperature: float, filters: dict[str, int]) -> None:
    """Catches a temperature used upside down and uniform numbers that are not uniform."""
    wanted = torch.softmax(LOGITS / temperature, -1).tolist()
    assert shares(draws(20_000, temperature=temperature, **filters)) == pytest.approx(wanted, abs=0.015)


def test_top_k_keeps_k_and_top_p_the_fewest_that_reach_p() -> None:
    """Catches a filter that keeps one token too many or too few, and filters that ignore one another."""
    probabilities = torch.softmax(LOGITS, -1).cumsum(-1).tolist()
    assert set(draws(3000, top_k=2)) == {0, 1}
    assert set(draws(3000, top_p=probabilities[1] + 0.01)) == {0, 1, 2}
    assert set(draws(3000, top_p=probabilities[1] - 0.01)) == {0, 1}
    assert set(draws(3000, top_p=1e-9)) == {0}
    assert set(draws(3000, top_k=2, top_p=0.999)) == {0, 1}
    assert set(draws(3000, top_k=1)) == {0}


@given(st.integers(0, 2**63 - 1), st.integers(0, 10_000), st.integers(0, 4))
def test_a_draw_does_not_depend_on_its_batch(seed: int, position: int, place: int) -> None:
    """Catches a generator shared by a batch: an answer would change with its neighbours."""
    mine = Draw(SamplingParams(temperature=0.9, top_p=0.9, seed=seed), position)
    others = [
        Draw(SamplingParams(temperature=t, top_k=k, seed=s), p)
        for t, k, s, p in ((0.0, 0, 1, 3), (1.0, 0, 2, 5), (1.0, 2, 3, 1), (5.0, 0, 4, 2))
    ]
    batch = [*others[:place], mine, *others[place:]]
    assert 0 <= mine.uniform < 1
    assert choose(LOGITS.repeat(5, 1), batch)[place] == choose(LOGITS[None], [mine])[0]


def test_seeds_and_positions_give_other_draws() -> None:
    """Catches one number used for all tokens, and seeds that are shifts of one another."""
    numbers = {Draw(SamplingParams(seed=seed), position).uniform for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500


def test_rows_that_are_not_finite_are_told_apart() -> None:
    """Catches a broken sequence that takes its batch with it."""
    rows = LOGITS.repeat(4, 1)
    rows[1, 2] = float("nan")
    rows[2, 2] = float("inf")
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
    ]
    tokens = choose(rows, [Draw(each, 0) for each in params]).tolist()
    assert tokens[:3] == [0, -1, -1]
    assert tokens[3] >= 0


def test_logprobs_are_of_the_whole_distribution() -> None:
    """Catches log-probabilities after temperature or filters, and a list that lacks the likeliest."""
    found = logprob(LOGITS, 2, 3)
    wanted = torch.log_softmax(LOGITS, -1).tolist()
    assert found.token == 2
    assert math.isclose(found.logprob, wanted[2], abs_tol=1e-6)
    assert [token for token, _ in found.top] == [0, 1, 2]
    assert [value for _, value in found.top] == pytest.approx(wanted[:3], abs=1e-6)
    assert logprob(LOGITS, 4, 0).top == ()
