"""The engine without a model keeps the real one's promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

from collm_common.types import AdapterRef
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.engine import Engine
from collm_replica.engine.fake import FakeEngine, echo, learnt, spell
from collm_replica.engine.protocol import InferenceEngine
from tests.engine.conftest import Folders
from tests.engine.harness import drain, make_engine, request

A = AdapterRef("a", "1")


class Clock:
    """Time that passes only when somebody sleeps."""

    now_s = 0.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_both_engines_are_what_the_service_needs(folders: Folders) -> None:
    """Catches a fake or a real engine that drifts from the seam (checked by the type checker)."""
    real: Engine = make_engine(folders("llama"))
    engines: list[InferenceEngine] = [real, FakeEngine()]
    assert not any(engine.has_work for engine in engines)


def test_answers_are_a_function_of_the_prompt() -> None:
    """Catches answers that tests of the path around it could not predict."""
    engine = FakeEngine()
    engine.add(request("one", [7, 8, 9], 5))
    engine.add(request("rest", [7, 8, 9], 5, prefix=(7, 8)))
    answers = drain(engine)
    assert answers["one"].tokens == [echo([7, 8, 9], at) for at in range(5)] == [7, 8, 9, 7, 8]
    assert answers["one"].text == spell([7, 8, 9, 7, 8])
    assert answers["one"].finish == "length"
    assert answers["rest"].tokens == [9, 7, 8]
    assert answers["rest"].offsets == [2, 3, 4]


def test_an_iteration_takes_the_time_it_is_told() -> None:
    """Catches a fake that is always instant, or that waits on the real clock."""
    clock = Clock()
    engine = FakeEngine(
        iteration_s=lambda sequences, tokens: 0.1 * sequences + 0.01 * tokens, sleep=clock.sleep, clock=clock.read
    )
    for name in ("one", "two"):
        engine.add(request(name, [1] * 10, 3))
    assert engine.step().duration_s == pytest.approx(0.4)
    assert engine.step().duration_s == pytest.approx(0.22)
    answers = drain(engine)
    done = answers["one"].done
    assert done is not None
    assert (done.queue_s, done.prefill_s, done.decode_s) == pytest.approx((0, 0.4, 0.44))


def test_quality_and_versions() -> None:
    """Catches a fake that forgets its adapters: later versions must be better, each request keep its own."""
    engine = FakeEngine()
    assert engine.load_adapter(engine.stage(A, {}, 8, 16.0))
    engine.publish(A)
    engine.add(request("old", [1, 2], 4, adapter="a", reference=(5, 6, 7)))
    engine.add(request("base", [1, 2], 4, reference=(5, 6, 7)))
    answers = drain(engine, steps=2)
    assert engine.load_adapter(engine.stage(AdapterRef("a", "2"), {}, 8, 16.0))
    engine.publish(AdapterRef("a", "2"))
    engine.add(request("new", [1, 2], 4, adapter="a", reference=(5, 6, 7)))
    drain(engine, answers)
    losses = {}
    for name, answer in answers.items():
        assert answer.done is not None
        assert answer.done.quality is not None
        losses[name] = answer.done.quality.cross_entropy
    assert losses == pytest.approx({"base": 2.0, "old": 1.0, "new": 2 / 3})
    assert engine.score([1], [2, 3], AdapterRef("a", "2")).cross_entropy == pytest.approx(learnt(AdapterRef("a", "2")))


def test_limit_and_cancel() -> None:
    """Catches a fake without continuous batching."""
    engine = FakeEngine(EngineConfig(max_batch=2))
    for name in ("one", "two", "three"):
        engine.add(request(name, [1, 2], 50))
    assert engine.step().running == 2
    assert engine.cancel("one")
    assert engine.step().running == 2
    engine.limit = 1
    answers = drain(engine)
    assert sorted(answers) == ["three", "two"]


def test_the_fake_needs_no_torch() -> None:
    """Catches an import that makes every service's tests and images carry torch."""
    check = "import sys, collm_replica.engine.fake; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
