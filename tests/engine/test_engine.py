"""The engine's behaviour as its service sees it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

from collm_common.errors import AdapterError, InvalidRequest, ModelError, Overloaded, UnknownModel
from collm_common.types import AdapterRef
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.engine import Engine
from collm_replica.engine.sampler import Draw
from tests.engine.conftest import Folders
from tests.engine.harness import CONFIG, Answer, drain, generate, load, make_engine, prompts, publish, request
from tests.support.models import EOS_ID, VOCAB, byte_tokenizer, random_adapter

A = AdapterRef("a", "1")
SAMPLED: dict[str, Any] = {"temperature": 1.3, "top_p": 0.95}


@pytest.fixture
def engine(folders: Folders) -> Engine:
    return make_engine(folders("llama"))


def test_sampling_does_not_depend_on_the_batch(folders: Folders, engine: Engine) -> None:
    """Catches answers that change with the neighbours in the batch or with chunks."""
    texts = prompts(7, 12, 20, 31)
    for i, prompt in enumerate(texts):
        engine.add(request(str(i), prompt, 20, seed=i, **SAMPLED))
    together = drain(engine)
    other = make_engine(folders("llama"), replace(CONFIG, step_tokens=8, max_batch=2))
    for i, prompt in enumerate(texts):
        other.add(request(str(i), prompt, 20, seed=i, **SAMPLED))
        alone = drain(other)
        assert alone[str(i)].tokens == together[str(i)].tokens


@pytest.mark.parametrize("prefix", [(), (3, 1, 4)])
def test_each_token_has_its_own_draw(folders: Folders, prefix: tuple[int, ...]) -> None:
    """Catches one random number used for all tokens of an answer, or counted from the wrong place."""
    model = load(folders("llama"))
    torch.nn.init.zeros_(model.lm_head.weight)
    engine = Engine(model, byte_tokenizer(), CONFIG)
    asked = request("flat", [1, 2, 3], 20, temperature=1.0, seed=5, prefix=prefix)
    engine.add(asked)
    wanted = [int(Draw(asked.sampling, at).uniform * VOCAB) for at in range(len(prefix), 20)]
    assert drain(engine)["flat"].tokens == wanted


@pytest.mark.parametrize("seen", [1, 9, 19])
def test_a_request_goes_on_behind_its_prefix(folders: Folders, engine: Engine, seen: int) -> None:
    """Catches a re-dispatched answer that differs from, repeats or leaves out what the first would have said."""
    prompt = prompts(15)[0]
    engine.add(request("whole", prompt, 20, seed=5, **SAMPLED))
    whole = drain(engine)["whole"]
    engine.add(request("rest", prompt, 20, seed=5, attempt=1, prefix=tuple(whole.tokens[:seen]), **SAMPLED))
    rest = drain(engine)["rest"]
    assert rest.tokens == whole.tokens[seen:]
    assert rest.offsets == list(range(seen, 20))
    assert rest.done is not None
    assert rest.done.output_tokens == 20
    assert whole.text.endswith(rest.text)


@pytest.mark.parametrize("reference", [(), (1, 2, 3)])
def test_a_prefix_that_is_the_whole_answer_ends_at_once(engine: Engine, reference: tuple[int, ...]) -> None:
    """Catches a request whose last reply was lost and that would generate past its end."""
    engine.add(request("full", [1, 2], 3, prefix=(5, 6, 7), reference=reference))
    engine.add(request("eos", [1, 2], 3, prefix=(5, EOS_ID), ignore_eos=False, reference=reference))
    engine.add(request("left", [1, 2], 3, prefix=(5, EOS_ID), ignore_eos=False, reference=reference))
    assert engine.cancel("left")
    answers = drain(engine)
    assert [(answers[name].finish, answers[name].tokens) for name in ("full", "eos")] == [("length", []), ("stop", [])]
    assert "left" not in answers
    for name in ("full", "eos"):
        done = answers[name].done
        assert done is not None
        assert (done.quality is not None) == bool(reference)
        assert min(done.queue_s, done.prefill_s, done.decode_s) >= 0


def test_replies_tell_text_logprobs_and_times(engine: Engine) -> None:
    """Catches offsets with gaps, text that is not the tokens', and log-probabilities that are not asked for."""
    prompt = prompts(9)[0]
    engine.add(request("with", prompt, 8, logprobs=2))
    engine.add(request("without", prompt, 8))
    answers = drain(engine)
    answer = answers["with"]
    assert answer.offsets == list(range(8))
    assert answer.text == byte_tokenizer().decode(answer.tokens, skip_special_tokens=True)
    assert [each.token for each in answer.logprobs] == answer.tokens
    assert all(each.top[0] == (each.token, each.logprob) for each in answer.logprobs)
    assert not answers["without"].logprobs
    assert answer.done is not None
    assert answer.done.output_tokens == 8
    assert answer.done.prefill_s > 0
    assert answer.done.decode_s > 0


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_prompts_log_probabilities_are_the_models_own(folders: Folders, run_ahead: bool) -> None:
    """Log-probabilities off by one place, of one piece of a prompt only, or lost to a prefix that was known already."""
    folder = folders("llama")
    engine = make_engine(folder, replace(CONFIG, step_tokens=16, run_ahead=run_ahead))
    first, second = prompts(41, 70)
    told: dict[str, Answer] = {}
    for turn in range(2):
        for name, prompt in (("a", first), ("b", second)):
            engine.add(request(f"{name}{turn}", prompt, 3, logprobs=2, prompt_logprobs=True))
        engine.add(request(f"c{turn}", [7], 3, logprobs=2, prompt_logprobs=True))
        engine.add(request(f"d{turn}", first, 3, logprobs=2))
        told |= drain(engine)
    model = load(folder)
    for turn in range(2):
        for name, prompt in (("a", first), ("b", second)):
            with torch.inference_mode():
                wanted = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
            found = told[f"{name}{turn}"].prompt_logprobs
            assert [one.token for one in found] == prompt[1:]
            for place, one in enumerate(found):
                assert one.logprob == pytest.approx(float(wanted[place, one.token]), abs=1e-3)
                assert one.top[0][1] == pytest.approx(float(wanted[place].max()), abs=1e-3)
        assert told[f"a{turn}"].tokens == told[f"d{turn}"].tokens
        assert told[f"c{turn}"].prompt_logprobs == told[f"d{turn}"].prompt_logprobs == []
    done = told["d1"].done
    assert done is not None
    assert done.cached_tokens > 0


def test_steps_count_their_tokens(engine: Engine) -> None:
    """Catches telemetry that mixes prefill and decode."""
    engine.add(request("one", prompts(9)[0], 2))
    first, second = engine.step(), engine.step()
    assert (first.prefill_tokens, first.decode_tokens, first.running) == (9, 0, 1)
    assert (second.prefill_tokens, second.decode_tokens, second.running) == (0, 1, 1)
    assert first.duration_s > 0
    assert not engine.step().replies


def test_cancel_frees_everything_before_the_next_step(engine: Engine) -> None:
    """Catches a client that left and whose answer goes on, or whose blocks and slot stay."""
    free = engine.free_blocks
    engine.limit = 2
    for name in ("runs", "stays", "waits"):
        engine.add(request(name, prompts(20)[0], 30))
    drain(engine, steps=2)
    assert (engine.running, engine.waiting) == (2, 1)
    assert engine.cancel("runs")
    assert engine.cancel("waits")
    assert not engine.cancel("never")
    assert engine.running == 1
    assert engine.free_blocks == free - 6
    answers = drain(engine)
    assert list(answers) == ["stays"]
    assert engine.free_blocks == free


def test_the_limit_is_live(engine: Engine) -> None:
    """Catches a b that only counts at start, throws answers away, or exceeds the engine's own."""
    for i, prompt in enumerate(prompts(*[5] * 8)):
        engine.add(request(str(i), prompt, 30))
    engine.limit = 3
    assert engine.step().running == 3
    engine.limit = 5
    assert engine.step().running == 5
    engine.limit = 1
    assert engine.step().running == 5
    engine.limit = 100
    assert engine.limit == CONFIG.max_batch
    assert engine.step().running == 8
    with pytest.raises(ValueError, match="at least 1"):
        engine.limit = 0


def test_what_cannot_be_served_is_refused_by_name(engine: Engine) -> None:
    """Catches requests that fail deep inside a batch instead of at the door."""
    with pytest.raises(InvalidRequest, match="prompt has 100 tokens and max_tokens 29") as error:
        engine.add(request("long", [1] * 100, 29))
    assert error.value.param == "max_tokens"
    with pytest.raises(InvalidRequest, match="and reference 40"):
        engine.add(request("long", [1] * 100, 1, reference=(1,) * 40))
    with pytest.raises(InvalidRequest, match="prefix: token 260"):
        engine.add(request("odd", [1], prefix=(260,)))
    with pytest.raises(InvalidRequest, match="no tokens"):
        engine.add(request("empty", []))
    with pytest.raises(UnknownModel, match="no adapter 'a'"):
        engine.add(request("unknown", [1], adapter="a"))
    with pytest.raises(UnknownModel, match="a@v3 is not loaded"):
        engine.add(request("old", [1], adapter="a", version="3"))
    assert not engine.has_work


def test_a_full_queue_refuses(engine: Engine) -> None:
    """Catches a queue without a bound."""
    for i in range(CONFIG.max_waiting):
        engine.add(request(str(i), [1]))
    with pytest.raises(Overloaded, match="64 requests wait") as error:
        engine.add(request("more", [1]))
    assert error.value.retry_after_s


def test_a_request_delivered_twice_runs_once_and_a_newer_attempt_replaces_it(engine: Engine) -> None:
    """Catches doubled answers, and an old attempt that goes on beside the new."""
    engine.add(request("one", [1, 2, 3]))
    engine.add(request("one", [1, 2, 3]))
    drain(engine, steps=3)
    engine.add(request("one", [1, 2, 3], attempt=1, prefix=(9, 9)))
    answer = drain(engine)["one"]
    assert answer.offsets == list(range(2, 12))
    assert answer.done is not None
    assert answer.done.attempt == 1


def test_a_version_asked_for_is_held_while_the_request_waits(folders: Folders, engine: Engine) -> None:
    """Catches a version that is freed between arrival and admission."""
    adapter = random_adapter(folders("llama"), 4, 8.0)
    publish(engine, A, adapter, 4, 8.0)
    engine.add(request("pinned", [1, 2], adapter="a", version="1"))
    engine.add(request("current", [1, 2], adapter="a"))
    publish(engine, AdapterRef("a", "2"), adapter, 4, 8.0)
    answers = drain(engine)
    assert answers["pinned"].adapters == {A}
    assert answers["current"].adapters == {AdapterRef("a", "2")}
    assert engine.versions == {"a": AdapterRef("a", "2")}


def test_without_a_free_slot_a_load_is_put_off(folders: Folders) -> None:
    """Catches a load that overwrites a version in use, and one that can never be taken."""
    folder = folders("llama")
    adapter = random_adapter(folder, 4, 8.0)
    engine = make_engine(folder, replace(CONFIG, slots=1))
    assert engine.load_adapter(engine.stage(A, adapter, 4, 8.0))
    assert engine.load_adapter(engine.stage(A, adapter, 4, 8.0))
    assert not engine.load_adapter(engine.stage(AdapterRef("a", "2"), adapter, 4, 8.0))
    engine.discard(A)
    assert engine.load_adapter(engine.stage(AdapterRef("a", "2"), adapter, 4, 8.0))
    with pytest.raises(AdapterError, match="is the base model"):
        engine.stage(AdapterRef("a", "0"), adapter, 4, 8.0)
    with pytest.raises(AdapterError, match="no slots"):
        make_engine(folder, replace(CONFIG, slots=0)).stage(A, adapter, 4, 8.0)


def test_an_unfit_adapter_takes_no_slot(folders: Folders, engine: Engine) -> None:
    """Catches a slot lost with every bad adapter."""
    with pytest.raises(AdapterError, match="rank 9"):
        engine.stage(A, random_adapter(folders("llama"), 9, 8.0), 9, 8.0)
    assert engine.free_slots == CONFIG.slots


def test_a_broken_sequence_fails_alone_and_leaves_no_trace(folders: Folders, engine: Engine) -> None:
    """Catches values that are not finite and reach other answers through the batch or through freed blocks."""
    folder = folders("llama")
    publish(engine, A, {name: t * 1e30 for name, t in random_adapter(folder, 4, 8.0).items()}, 4, 8.0)
    free = engine.free_blocks
    prompt, other = prompts(30, 10)
    engine.add(request("broken", prompt, adapter="a"))
    engine.add(request("fine", other))
    answers = drain(engine)
    assert answers["broken"].failed is not None
    assert answers["broken"].failed.status == 500
    assert engine.free_blocks == free
    engine.add(request("later", other))
    assert drain(engine)["later"].tokens == answers["fine"].tokens
    assert len(answers["fine"].tokens) == 12


def test_a_broken_prompt_does_not_reach_its_neighbours(folders: Folders) -> None:
    """Catches block tables padded with a block that somebody owns: what is not finite there is not masked by zero."""
    folder = folders("llama")
    engine = make_engine(folder, replace(CONFIG, step_tokens=12))
    publish(engine, A, {name: t * 1e30 for name, t in random_adapter(folder, 4, 8.0).items()}, 4, 8.0)
    gone, long, short, broken = prompts(4, 11, 5, 40)
    for name, prompt in (("gone", gone), ("long", long), ("short", short)):
        engine.add(request(name, prompt, 20))
    answers = drain(engine, steps=4)
    engine.cancel("gone")
    engine.add(request("broken", broken, adapter="a"))
    drain(engine, answers)
    assert answers["broken"].failed is not None
    model = load(folder)
    assert [answers[n].tokens for n in ("long", "short")] == [generate(model, p, 20) for p in (long, short)]


def test_a_score_that_breaks_takes_no_answer_back(folders: Folders, engine: Engine) -> None:
    """Catches a complete answer that is followed by a failure."""
    engine.add(request("one", [1, 2, 3], 2, reference=(4, 5)))
    answers = drain(engine, steps=2)
    with torch.no_grad():
        engine._backend._decoder.head.fill_(float("nan"))  # type: ignore[attr-defined]
    drain(engine, answers)
    assert answers["one"].finish == "length"
    assert answers["one"].done is not None
    assert answers["one"].done.quality is None


def test_an_error_while_one_answer_is_handled_fails_it_alone(folders: Folders) -> None:
    """Catches an engine that dies of one request's text."""
    folder = folders("llama")

    class Picky:
        """A tokenizer that cannot read one token."""

        eos_token_id = EOS_ID
        poison: int | None = None

        def decode(self, tokens: list[int], **_: bool) -> str:
            if self.poison in tokens:
                raise KeyError(self.poison)
            return "x" * len(tokens)

    tokenizer = Picky()
    engine = Engine(load(folder), tokenizer, CONFIG)  # type: ignore[arg-type]
    first, second = prompts(6, 8)
    engine.add(request("one", first))
    tokenizer.poison = drain(engine)["one"].tokens[3]
    engine.add(request("one", first))
    engine.add(request("two", second))
    answers = drain(engine)
    assert answers["one"].failed is not None
    assert len(answers["one"].tokens) == 3
    assert answers["two"].done is not None or tokenizer.poison in answers["two"].tokens


def test_nothing_leaks_in_a_random_workload(folders: Folders) -> None:
    """Catches blocks, slots, requests or pins lost in any interleaving of arrivals, cancels, swaps and limits."""
    folder = folders("llama")
    adapters = {rank: random_adapter(folder, rank, 8.0, seed=rank) for rank in (2, 4)}
    engine = make_engine(folder, replace(CONFIG, kv_bytes=512 * 160, step_tokens=24))
    free = engine.free_blocks
    chance = random.Random(0)
    answers: dict[str, Answer] = {}
    cancelled: set[str] = set()
    version = 0
    for turn in range(250):
        name = str(turn)
        if chance.random() < 0.45 and engine.waiting < CONFIG.max_waiting:
            adapter = "a" if version and chance.random() < 0.6 else ""
            prompt = prompts(chance.randint(1, 60), seed=turn)[0]
            reference = tuple(prompt[: chance.choice((0, 0, 5, 30))])
            engine.add(request(name, prompt, chance.randint(1, 30), adapter=adapter, reference=reference, **SAMPLED))
            answers[name] = Answer()
        if answers and chance.random() < 0.1:
            gone = chance.choice(sorted(answers))
            if engine.cancel(gone):
                cancelled.add(gone)
        if chance.random() < 0.1:
            rank = chance.choice((2, 4))
            ref = AdapterRef("a", str(version + 1))
            if engine.load_adapter(engine.stage(ref, adapters[rank], rank, 8.0)):
                if chance.random() < 0.8:
                    engine.publish(ref)
                    version += 1
                else:
                    engine.discard(ref)
        engine.limit = chance.randint(1, 8)
        drain(engine, answers, steps=1)
    drain(engine, answers)
    assert engine.free_blocks == free
    assert engine.free_slots == CONFIG.slots - 1
    assert engine.preemptions > 0
    assert version > 5
    for name, answer in answers.items():
        assert (answer.done is not None) == (name not in cancelled)
        assert len(answer.adapters) <= 1
        assert answer.offsets == list(range(len(answer.offsets)))


def test_models_that_cannot_be_served_are_refused_by_name(folders: Folders) -> None:
    """Catches wrong answers from an architecture, rotary form, context or budget that does not fit."""
    tokenizer = AutoTokenizer.from_pretrained(folders("llama"))
    auto: Any = AutoModelForCausalLM
    other = auto.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16))
    with pytest.raises(ModelError, match="GPT2LMHeadModel cannot be served"):
        Engine(other, tokenizer, CONFIG)
    dynamic = load(folders("llama"))
    dynamic.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ModelError, match="rope_type dynamic"):
        Engine(dynamic, tokenizer, CONFIG)
    with pytest.raises(ModelError, match="512 positions, fewer than context_tokens 513"):
        make_engine(folders("llama"), replace(CONFIG, context_tokens=513))
    with pytest.raises(ModelError, match="kv_bytes 4096 hold 4 tokens"):
        make_engine(folders("llama"), replace(CONFIG, kv_bytes=4096))


def test_wrong_configurations_are_refused_by_name() -> None:
    """Catches an engine that can never run a full batch."""
    with pytest.raises(ValueError, match="max_batch is 0"):
        EngineConfig(max_batch=0)
    with pytest.raises(ValueError, match="step_tokens 4 is less than max_batch 8"):
        EngineConfig(step_tokens=4, max_batch=8)
