"""Answers that begin with keys and values of earlier requests are those of an engine that keeps none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import AdapterRef
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.core import EngineCore
from collm_replica.engine.fake import spell
from collm_replica.engine.protocol import Broken, Outcome, Sampled, Scored
from collm_replica.engine.sequence import Chunk, Pin
from tests.engine.conftest import Folders
from tests.engine.harness import (
    CONFIG,
    Answer,
    drain,
    generate,
    load,
    loss,
    make_engine,
    prompts,
    publish,
    request,
    with_adapter,
)
from tests.support.models import random_adapter

VOCABULARY = 4
BASE, POISON = 0, 3


@lru_cache(maxsize=100_000)
def cell(weights: int, tokens: tuple[int, ...]) -> int:
    """Keys and values of the last token: they depend on all tokens up to it and on the weights."""
    return hash((weights, tokens))


def choose(cells: Sequence[int]) -> int:
    """The next token depends on every key and value there is."""
    return hash(tuple(cells)) % VOCABULARY


def told(weights: int, prompt: Sequence[int], count: int) -> list[int]:
    """The answer to a prompt, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(choose([cell(weights, tuple(tokens[: at + 1])) for at in range(len(tokens))]))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Later:
    """Outcomes of a run that is through on the device and not yet on the host."""

    results: list[Outcome]

    def outcomes(self) -> list[Outcome]:
        return self.results


class Ledger:
    """A backend whose keys and values tell exactly what they were computed from, in paged memory like a real one's.

    Weights POISON break: what is computed under them is None, and whoever reads it is broken.
    """

    def __init__(self, blocks: int, block_tokens: int, slots: int) -> None:
        self.memory: list[list[int | None]] = [[0] * block_tokens for _ in range(blocks)]
        self.slots = [BASE] * slots
        self.recent: list[int] = []
        self.computed = 0

    def run(self, chunks: Sequence[Chunk]) -> Later:
        before, self.recent = self.recent, []
        return Later([self._chunk(chunk, before) for chunk in chunks])

    def _chunk(self, chunk: Chunk, before: list[int]) -> Outcome:
        sequence, size = chunk.sequence, len(self.memory[0])
        pin = sequence.pin or Pin()
        weights = self.slots[pin.slot] if pin.slot >= 0 else BASE
        tokens = [token if token >= 0 else before[-1 - token] for token in sequence.tokens[: chunk.end]]
        for at in range(chunk.start, chunk.end):
            value = None if weights == POISON else cell(weights, tuple(tokens[: at + 1]))
            self.memory[sequence.blocks[at // size]][at % size] = value
        self.computed += chunk.count
        read = [self.memory[sequence.blocks[at // size]][at % size] for at in range(chunk.end)]
        if chunk.samples:
            whole = [each for each in read if each is not None]
            self.recent.append(choose(whole))
            return Broken("not finite") if len(whole) < len(read) else Sampled(self.recent[-1])
        if chunk.targets:
            assert read == [cell(weights, tuple(tokens[: at + 1])) for at in range(chunk.end)] or None in read
            return Broken("not finite") if None in read else Scored(float(len(chunk.targets)))
        return None

    def score(self, prompt: Sequence[int], reference: Sequence[int], pin: Pin) -> float:
        return 0.0

    def stage(self, tensors: Any, rank: int, alpha: float) -> int:
        return rank

    def load(self, slot: int, factors: int) -> None:
        self.slots[slot] = factors

    def clear(self, slot: int) -> None:
        self.slots[slot] = -1

    def scrub(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.memory[block] = [0] * len(self.memory[block])


def ledger_engine(config: EngineConfig, blocks: int) -> tuple[EngineCore, Ledger]:
    ledger = Ledger(blocks, config.block_tokens, config.slots)
    return EngineCore(ledger, spell, frozenset(), VOCABULARY, blocks, config, lambda: 0.0), ledger


ANSWER, REFERENCE = st.integers(1, 8), st.sampled_from((0, 0, 3, 9))
ARRIVAL = st.tuples(
    st.just("add"), st.sampled_from(("", "a", "b", "0")), st.integers(0, 1), st.integers(3, 14), ANSWER, REFERENCE
)
STEP = st.tuples(st.just("step"), st.sampled_from((1, 1, 2, 3, 20)))
MOVE = st.one_of(
    ARRIVAL,
    STEP,
    ARRIVAL,
    STEP,
    st.tuples(st.just("turn"), st.integers(0, 30), st.sampled_from("ab"), ANSWER, REFERENCE),
    STEP,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("again"), st.integers(0, 30)),
    st.tuples(st.just("publish"), st.sampled_from("ab"), st.integers(1, POISON)),
    st.tuples(st.just("snapshot"), st.sampled_from("ab"), st.integers(1, 2), st.booleans()),
)
SHAPES: list[list[int]] = [[0, 1, 2, 3] * 4, [0, 1, 2, 3, 0, 1, 0, 0, 0, 0, 1, 2, 3, 1]]


class Play:
    """One engine through a list of moves. `meant`: request -> all contents that its adapter's version ever had."""

    def __init__(self, config: EngineConfig, blocks: int) -> None:
        self.engine, self.ledger = ledger_engine(config, blocks)
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.contents: dict[AdapterRef | None, set[int]] = {None: {BASE}, AdapterRef("0", "0"): {BASE}}
        self.engine.publish(AdapterRef("0", "0"))
        for name in "ab":
            self.install(AdapterRef(name, "1"), 1)
        self.version = 1

    def install(self, ref: AdapterRef, content: int) -> None:
        if self.load(ref, content):
            self.contents.setdefault(ref, set()).add(content)
            self.engine.publish(ref)

    def load(self, ref: AdapterRef, content: int) -> bool:
        return self.engine.load_adapter(self.engine.stage(ref, {}, content, 1.0), "ab")

    def move(self, move: tuple[Any, ...]) -> None:
        names = list(self.asked)
        match move:
            case ("add", adapter, shape, length, count, reference):
                self.add(adapter, SHAPES[shape][:length], count, reference)
            case ("turn", number, adapter, count, reference) if names:
                name = names[number % len(names)]
                prompt = [*self.asked[name][0], *self.answers[name].tokens, 1]
                self.add(adapter, prompt[:14], count, reference)
            case ("step", steps):
                drain(self.engine, self.answers, steps)
            case ("cancel", number) if names:
                self.engine.cancel(names[number % len(names)])
            case ("again", number) if names:
                self.again(names[number % len(names)])
            case ("publish", name, content):
                self.version += 1
                self.install(AdapterRef(name, str(self.version)), content)
            case ("snapshot", name, content, kept):
                ref = AdapterRef(name, f"{self.version}.1")
                if not self.load(ref, content):
                    return
                if ref not in self.engine.versions.values():
                    self.contents.setdefault(ref, set()).add(content)
                if kept:
                    self.engine.publish(ref)
                self.engine.discard(ref)

    def add(self, adapter: str, prompt: list[int], count: int, reference: int) -> None:
        name, scored = str(len(self.asked)), tuple(SHAPES[1][4 : 4 + reference])
        self.engine.add(request(name, prompt, count, adapter=adapter, reference=scored))
        self.asked[name] = (prompt, count)

    def again(self, name: str) -> None:
        """Cancel an answer and dispatch the rest of it, as after the loss of a replica."""
        answer, (prompt, count) = self.answers[name], self.asked[name]
        versions = {ref for ref in answer.adapters if ref is not None}
        if answer.finish is None and self.engine.cancel(name) and len(versions) <= 1:
            ref = next(iter(versions), None)
            if ref is not None and ref not in self.engine.versions.values():
                return
            adapter, version = (ref.name, ref.version) if ref else ("", None)
            prefix = tuple(answer.tokens)
            self.engine.add(request(name, prompt, count, adapter=adapter, version=version, prefix=prefix, attempt=1))

    def check(self) -> None:
        """Every token that was said is right, and everything was given back."""
        for name, answer in self.answers.items():
            prompt, _ = self.asked[name]
            contents = {content for ref in answer.adapters for content in self.contents[ref]} - {POISON}
            wanted = [told(content, prompt, len(answer.tokens)) for content in contents]
            assert not answer.tokens or answer.tokens in wanted, name
        assert not self.engine.has_work
        assert self.engine.kv_usage == 0


@given(
    moves=st.lists(MOVE, min_size=20, max_size=60),
    blocks=st.integers(12, 40),
    block_tokens=st.integers(2, 3),
    step_tokens=st.sampled_from((4, 7, 64)),
    run_ahead=st.booleans(),
    prefix_cache=st.booleans(),
)
def test_every_token_is_computed_from_the_right_keys_and_values(
    moves: list[tuple[Any, ...]], blocks: int, block_tokens: int, step_tokens: int, run_ahead: bool, prefix_cache: bool
) -> None:
    """Catches a block of other tokens, another version or an earlier load; one that is not written yet, was written
    over, or is broken; and one that is lost, in any order of arrivals, swaps, cancels, preemption and scores.
    """
    config = EngineConfig(
        max_batch=3,
        block_tokens=block_tokens,
        step_tokens=step_tokens,
        slots=3,
        context_tokens=23,
        run_ahead=run_ahead,
        prefix_cache=prefix_cache,
    )
    play = Play(config, blocks)
    for move in moves:
        play.move(move)
    drain(play.engine, play.answers)
    play.check()


A = AdapterRef("a", "1")
SYSTEM = prompts(21)[0]


def ask(engine: EngineCore, name: str, prompt: Sequence[int], count: int = 6, **fields: Any) -> Answer:
    engine.add(request(name, prompt, count, **fields))
    return drain(engine)[name]


def cached(answer: Answer) -> int:
    assert answer.done is not None
    return answer.done.cached_tokens


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("step_tokens", [64, 9])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_turns_of_a_conversation_are_those_of_hugging_face(
    folders: Folders, window: int | None, step_tokens: int, run_ahead: bool
) -> None:
    """Catches a hit at a wrong position, under another adapter, or into half a block; and turns that hit nothing."""
    folder = folders("mistral", sliding_window=window)
    tensors = random_adapter(folder, 4, 8.0, seed=1)
    engine = make_engine(folder, replace(CONFIG, step_tokens=step_tokens, run_ahead=run_ahead))
    publish(engine, A, tensors, 4, 8.0)
    models = {"": load(folder), "a": with_adapter(folder, tensors, 4, 8.0)}
    for adapter, model in models.items():
        history, known = list(SYSTEM), 0
        for turn, said in enumerate(prompts(5, 2, 9)):
            prompt = [*history, *said]
            answer = ask(engine, f"{adapter}{turn}", prompt, adapter=adapter)
            assert answer.tokens == generate(model, prompt, 6)
            assert cached(answer) == known
            # The last token of an answer is never run.
            history = [*prompt, *answer.tokens]
            known = (len(history) - 1) // CONFIG.block_tokens * CONFIG.block_tokens


def test_a_prompt_that_is_known_as_a_whole_is_computed_in_its_last_block(folders: Folders) -> None:
    """Catches an answer without logits, and a hit that is not told of."""
    engine = make_engine(folders("llama"))
    prompt = SYSTEM[: 4 * CONFIG.block_tokens]
    first = ask(engine, "first", prompt)
    engine.add(request("second", prompt, 6))
    assert engine.step().prefill_tokens == 4
    second = drain(engine)["second"]
    assert second.tokens == first.tokens[1:]
    assert cached(second) == 12


def test_what_is_turned_off_keeps_nothing(folders: Folders) -> None:
    """Catches a setting that does nothing."""
    engine = make_engine(folders("llama"), replace(CONFIG, prefix_cache=False))
    for _ in range(2):
        assert cached(ask(engine, "same", SYSTEM)) == 0


def test_a_version_in_the_place_of_another_finds_nothing_of_it(folders: Folders) -> None:
    """Catches keys and values of the version before under the new one, or of what was loaded under the same number."""
    folder = folders("llama")
    engine = make_engine(folder, replace(CONFIG, slots=2))
    for ref, seed in ((A, 1), (AdapterRef("a", "2"), 2), (A, 3)):
        tensors = random_adapter(folder, 4, 8.0, seed=seed)
        publish(engine, ref, tensors, 4, 8.0)
        model = with_adapter(folder, tensors, 4, 8.0)
        for known in (0, 20):
            answer = ask(engine, f"{seed}", SYSTEM, adapter="a")
            assert answer.tokens == generate(model, SYSTEM, 6)
            assert cached(answer) == known


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_reference_is_scored_as_if_nothing_was_kept(folders: Folders, run_ahead: bool) -> None:
    """Catches a loss with targets left out after a hit, and a reference written over somebody else's answer."""
    folder = folders("llama")
    engine = make_engine(folder, replace(CONFIG, run_ahead=run_ahead))
    prompt, reference = SYSTEM[:18], prompts(11, seed=4)[0]
    plain = ask(engine, "plain", prompt)
    whole = [*prompt, *plain.tokens]
    for turn in range(2):
        answer = ask(engine, f"scored {turn}", prompt, reference=tuple(reference))
        assert answer.tokens == plain.tokens
        assert answer.done is not None
        assert answer.done.quality is not None
        assert answer.done.quality.tokens == len(reference)
        wanted = loss(load(folder), prompt, reference)
        assert answer.done.quality.cross_entropy == pytest.approx(wanted, abs=1e-4)
        assert engine.score(prompt, reference).cross_entropy == pytest.approx(wanted, abs=1e-4)
        going_on = ask(engine, f"longer {turn}", whole)
        assert going_on.tokens == generate(load(folder), whole, 6)
        assert cached(going_on) == 20


def test_a_preempted_answer_goes_on_from_what_is_left_of_it() -> None:
    """Catches preemption that computes everything again although nobody took the room."""
    config = EngineConfig(max_batch=2, block_tokens=2, step_tokens=64, slots=0, context_tokens=23)
    counts = {}
    for on in (True, False):
        engine, ledger = ledger_engine(replace(config, prefix_cache=on), 16)
        for name, prompt in (("older", SHAPES[0][:10]), ("younger", SHAPES[1][3:13])):
            engine.add(request(name, prompt, 10))
        answers = drain(engine)
        assert engine.preemptions == 1
        assert answers["younger"].tokens == told(BASE, SHAPES[1][3:13], 10)
        counts[on] = ledger.computed
    assert counts[True] < counts[False]


def test_an_answer_that_another_replica_began_is_found_with_its_prefix(folders: Folders) -> None:
    """Catches a re-dispatched request that finds its prompt only."""
    engine = make_engine(folders("llama"))
    first = ask(engine, "first", SYSTEM, 20)
    engine.add(request("again", SYSTEM, 20, prefix=tuple(first.tokens[:12])))
    step = engine.step()
    assert step.prefill_tokens + step.decode_tokens == 1
    again = drain(engine)["again"]
    assert again.tokens == first.tokens[13:]
    assert cached(again) == len(SYSTEM)
