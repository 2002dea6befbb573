"""The engine on a GPU: is it right, how far from the memory's speed, and what a trainer beside it costs.

Random weights in the shapes of Llama-3.1-8B (or of `--layers` of its layers). Every part runs even if another fails;
results go to a JSON file after each, next to those of earlier runs.
`--trainer` is the second process of the part `beside`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collm_common.messages import Delta, Request
from collm_common.types import AdapterRef, SamplingParams, Slo
from collm_replica import weights
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.engine import Engine
from collm_replica.engine.transfer import upload_all
from collm_replica.finetune.lora import Lora
from collm_replica.models import skeleton
from collm_replica.mps import Mps, MpsError
from collm_replica.sm_share import VARIABLE as SHARE
from collm_replica.telemetry import GpmUtilisation
from tests.support.models import byte_tokenizer, random_adapter, tiny_model_folder

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, RANK, CONTEXT, SIZES = 4, 16, 320, (1, 16, 64, 256)
ADAPTER = AdapterRef("a", "1")
TILINGS = ((64, 3, 4, 1), (64, 2, 4, 1), (128, 2, 4, 1), (128, 3, 8, 1), (32, 4, 2, 1), (64, 3, 2, 1), (64, 3, 4, 2))
MODE_S, PROMPTS, LENGTHS, TRAIN_STEPS = 55.0, 120, (17, 45), 250
Result = dict[str, Any]


# --- a model and an engine


def model_folder(path: Path, layers: int) -> Path:
    """A folder with a config and no weights."""
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    return path


class Owner:
    """Random weights in one flat buffer, with room for slots behind them, as the inference process has them."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        model: Any = skeleton(folder, torch.bfloat16)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        self.manifest = weights.layout(shapes, torch.bfloat16, SLOTS * RANK)
        self.flat = torch.zeros(self.manifest.size, dtype=torch.uint8, device=DEVICE)
        self.banks = weights.banks(self.flat, self.manifest)
        views = weights.views(self.flat, self.manifest)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for tensor in views.values():
            if tensor.dim() > 1:
                tensor.normal_(0.0, 0.02, generator=generator)
            else:
                tensor.fill_(1.0)
        self.model = weights.assemble(model, views)

    def export(self) -> bytes:
        """For the trainer."""
        return weights.export(self.flat, self.manifest)


def adapter_tensors(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA of every linear, as PEFT saves it."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:
            a = torch.randn(RANK, module.in_features, generator=generator, device=DEVICE) * module.in_features**-0.5
            b = torch.randn(module.out_features, RANK, generator=generator, device=DEVICE) * 0.02
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return tensors


def engine_on(owner: Owner, **config: Any) -> Engine:
    """With one adapter published, in the last slot."""
    bounds: dict[str, Any] = {
        "max_batch": max(SIZES),
        "kv_bytes": 48 << 30,
        "step_tokens": 16384,
        "slots": SLOTS,
        "max_rank": RANK,
        "context_tokens": 8704,
        "max_waiting": 1024,
        "fused": True,
        "run_ahead": True,
    }
    engine = Engine(owner.model, byte_tokenizer(), EngineConfig(**bounds | config), banks=owner.banks)
    engine.load_adapter(ADAPTER, adapter_tensors(owner.model, 1), RANK, 2.0 * RANK)
    engine.publish(ADAPTER)
    return engine


def request(name: str, prompt: Sequence[int], max_tokens: int, adapter: bool) -> Request:
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
        adapter=ADAPTER.name if adapter else "",
    )


def prompt_of(length: int, seed: int, vocabulary: int = 256) -> list[int]:
    """Random tokens."""
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(engine: Engine) -> dict[str, list[int]]:
    """Step until nothing is left; each request's tokens."""
    answers: dict[str, list[int]] = {}
    while engine.has_work:
        for reply in engine.step().replies:
            if isinstance(reply, Delta):
                answers.setdefault(reply.id, []).extend(reply.tokens)
    return answers


def quantiles(values: Sequence[float]) -> Result:
    """Median, 95th and 99th percentile, largest."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(q * len(ordered)))] for name, q in (("p95", 0.95), ("p99", 0.99))}
    return {"median": statistics.median(ordered), **at, "max": ordered[-1], "n": len(ordered)}


# --- parts


def ceilings(_: Bench) -> Result:
    """What the memory and the matrix units reach here, on random data."""
    source = torch.randn(2 << 30, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    copy_ms = event_ms(lambda: target.copy_(source), 10)
    read_ms = event_ms(lambda: source.view(torch.int32).max(), 10)
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    product_ms = event_ms(lambda: left @ right, 10)
    return {
        "copy_tb_s": 2 * source.nbytes / copy_ms / 1e9,
        "read_tb_s": source.nbytes / read_ms / 1e9,
        "matmul_tflop_s": 2 * 8192**3 / product_ms / 1e9,
    }


def event_ms(act: Callable[[], object], repeats: int) -> float:
    """Median of single runs, by device events."""
    act()
    times: list[float] = []
    for _ in range(repeats):
        event: Any = torch.cuda.Event
        start, end = (event(enable_timing=True) for _ in range(2))
        start.record()
        act()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def correct(bench: Bench) -> Result:
    """Logits of four layers in the full shapes: fused and plain bfloat16 against float32, for prompts and decodes."""
    owner = Owner(model_folder(bench.scratch / "small", 4), seed=3)
    small = {"max_batch": 24, "kv_bytes": 2 << 30, "step_tokens": 4096, "context_tokens": 2048, "run_ahead": False}
    engines = {"fused": engine_on(owner, **small), "plain": engine_on(owner, **small, fused=False)}
    wide = Owner.__new__(Owner)
    wide.model, wide.banks = float32_copy(owner.model, bench.scratch / "small"), {}
    engines["float32"] = engine_on(wide, **{**small, "fused": False, "kv_bytes": 4 << 30})
    logits = {name: captured_logits(engine, bench) for name, engine in engines.items()}
    errors: Result = {}
    for name in ("fused", "plain"):
        pairs = list(zip(logits[name], logits["float32"], strict=True))
        error = [float((a - b).norm() / b.norm()) for a, b in pairs]
        top = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
        errors[name] = {"relative_error": quantiles(error), "same_top_token": top / sum(len(a) for a, _ in pairs)}
    pairs = list(zip(logits["fused"], logits["plain"], strict=True))
    errors["fused_against_plain"] = quantiles([float((a - b).norm() / b.norm()) for a, b in pairs])
    return errors


def float32_copy(model: Any, folder: Path) -> Any:
    """The same numbers in float32."""
    wide = skeleton(folder, torch.float32)
    return weights.assemble(wide, {name: tensor.float() for name, tensor in model.named_parameters()})


def captured_logits(engine: Engine, bench: Bench) -> list[torch.Tensor]:
    """Logits (float32) of every run while forced tokens go through: chunked prompts, decodes, adapters mixed."""
    seen: list[torch.Tensor] = []
    backend: Any = engine._backend
    run, eager = backend.run, backend._forward

    def watched(chunks: Any) -> Any:
        for chunk in chunks:
            if chunk.decode:
                chunk.sequence.tokens[chunk.start] = (chunk.start * 7 + chunk.sequence.order * 13) % 256
        return run(chunks)

    def forward(batch: Any) -> torch.Tensor:
        logits: torch.Tensor = eager(batch)
        seen.append(logits.float())
        return logits

    def replayed(chunks: Any) -> Any:
        graph = replay(chunks)
        seen.append(graph.logits[: len(chunks)].float())
        return graph

    backend.run, backend._forward = watched, forward
    if backend._graphs is not None:
        replay = backend._graphs.run
        backend._graphs.run = replayed
    for number in range(20):
        engine.add(request(str(number), prompt_of(30 + 37 * number, number), 6, adapter=number % 2 == 0))
    finish(engine)
    return seen


def identical(bench: Bench) -> Result:
    """Greedy answers of small trained bfloat16 models: fused, one step ahead, against `generate` and plain.

    `float32_as_generate` says how many answers the precision alone leaves the same.
    """
    found: Result = {}
    for family in ("llama", "qwen3"):
        folder = trained_model(bench.scratch / family, family)
        adapter = random_adapter(folder, 8, 16.0, seed=1)
        config = EngineConfig(max_batch=16, slots=3, max_rank=8, context_tokens=256, kv_bytes=2**26, step_tokens=128)
        load: Any = AutoModelForCausalLM.from_pretrained
        answers: dict[str, dict[str, list[int]]] = {}
        for name, way in (("fused", {"fused": True, "run_ahead": True}), ("plain", {})):
            model = load(folder, dtype=torch.bfloat16).to(DEVICE)
            engine = Engine(model, byte_tokenizer(), EngineConfig(**{**vars(config), **way}))
            engine.load_adapter(ADAPTER, adapter, 8, 16.0)
            engine.publish(ADAPTER)
            for number in range(PROMPTS):
                engine.add(request(str(number), text_of(LENGTHS[number % 2], number), 24, adapter=number % 3 == 0))
            answers[name] = finish(engine)
        wide, reference = (load(folder, dtype=dtype).to(DEVICE).eval() for dtype in (torch.float32, torch.bfloat16))
        wanted, precise = (generate_all(model) for model in (reference, wide))
        found[family] = {
            "prompts_as_generate": sum(answers["fused"][name] == tokens for name, tokens in wanted.items())
            / len(wanted),
            "plain_as_generate": sum(answers["plain"][name] == tokens for name, tokens in wanted.items()) / len(wanted),
            "float32_as_generate": sum(precise[name] == tokens for name, tokens in wanted.items()) / len(wanted),
            "prompts_as_plain": sum(answers["fused"][name] == tokens for name, tokens in answers["plain"].items())
            / PROMPTS,
        }
    return found


def corpus() -> bytes:
    """Text: this repository's own."""
    root = Path(__file__).resolve().parents[1]
    return b"".join(path.read_bytes() for path in sorted(root.glob("services/replica/collm_replica/**/*.py")))


def text_of(length: int, seed: int) -> list[int]:
    """A piece of the corpus as tokens."""
    text = corpus()
    start = int(torch.randint(0, len(text) - length, (1,), generator=torch.Generator().manual_seed(seed)))
    return list(text[start : start + length])


def trained_model(path: Path, family: str) -> Path:
    """A small model of bytes, trained for a moment so that it knows what it says: random ones choose among equals."""
    folder = tiny_model_folder(
        path, family, hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=64, initializer_range=0.02
    )
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32).to(DEVICE)
    text = torch.tensor(list(corpus()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(TRAIN_STEPS):
        starts = torch.randint(0, len(text) - 128, (16,), generator=generator)
        ids = torch.stack([text[start : start + 128] for start in starts.tolist()]).to(DEVICE)
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def generate_all(model: Any) -> dict[str, list[int]]:
    """The answers to the prompts without an adapter, those of one length as one batch."""
    answers: dict[str, list[int]] = {}
    for parity, length in enumerate(LENGTHS):
        numbers = [number for number in range(parity, PROMPTS, 2) if number % 3]
        tokens = generate(model, [text_of(length, number) for number in numbers])
        answers |= {str(number): row for number, row in zip(numbers, tokens, strict=True)}
    return answers


@torch.inference_mode()
def generate(model: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Greedy tokens of Hugging Face for prompts of one length."""
    ids = torch.tensor(prompts, device=DEVICE)
    mask = torch.ones_like(ids)
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def decode(bench: Bench) -> Result:
    """A step with every row in use at a context of about 320 tokens: in the engine, and the graph alone."""
    engine, rows = bench.engine, {}
    read = bench.results["ceilings"]["read_tb_s"] * 1e9 if "ceilings" in bench.results else 4.1e9
    for count in SIZES:
        for adapter in (False, True):
            for number in range(count):
                engine.add(request(str(number), prompt_of(CONTEXT - 24, number), 60, adapter))
            durations = timed_steps(engine, 48)
            graph = bench.graph(count, adapter)
            alone_ms = event_ms(graph.replay, 20)
            for number in range(count):
                engine.cancel(str(number))
            finish(engine)
            kv_bytes = count * CONTEXT * 2 * 8 * 128 * 2 * bench.layers
            floor_ms = (bench.weight_bytes + kv_bytes) / read
            rows[f"{count}{' with adapters' if adapter else ''}"] = {
                "graph_ms": alone_ms,
                "step_ms": quantiles(durations[8:]),
                "floor_ms": floor_ms,
                "graph_over_floor": alone_ms / floor_ms,
            }
    return rows


def timed_steps(engine: Engine, count: int) -> list[float]:
    """Milliseconds of the decode-only steps among the next `count`."""
    results = [engine.step() for _ in range(count)]
    return [one.duration_s * 1e3 for one in results if one.decode_tokens and not one.prefill_tokens]


def throughput(bench: Bench) -> Result:
    """Requests of 256 in and 128 out, all at once, to the last token; the first run of each size warms up."""
    rates: Result = {}
    for count in (64, 256):
        for adapter in (False, False, True, True):
            for number in range(count):
                bench.engine.add(request(str(number), prompt_of(256, number), 128, adapter))
            started_s = time.perf_counter()
            answers = finish(bench.engine)
            elapsed_s = time.perf_counter() - started_s
            assert sum(map(len, answers.values())) == count * 128
            rates[f"{count}{' with adapters' if adapter else ''}"] = count * 128 / elapsed_s
    return rates


def prefill(bench: Bench) -> Result:
    """64 prompts of 256 tokens, and single long ones, to their first token (ms)."""
    found: Result = {}
    for name, count, length in (
        ("64 x 256", 64, 256),
        ("1 x 512", 1, 512),
        ("1 x 2048", 1, 2048),
        ("1 x 8192", 1, 8192),
    ):
        for adapter in (False, True):
            times = []
            for _ in range(3):
                for number in range(count):
                    bench.engine.add(request(str(number), prompt_of(length, number), 1, adapter))
                started_s = time.perf_counter()
                finish(bench.engine)
                times.append((time.perf_counter() - started_s) * 1e3)
            found[f"{name}{' with adapters' if adapter else ''}"] = min(times)
    return found


def stalls(bench: Bench) -> Result:
    """Steps of 32 running streams while prompts of 8,000 tokens arrive, by how many tokens a step may take."""
    found: Result = {}
    for step_tokens in (160, 288, 544, 2080):
        bench.engine._scheduler.step_tokens = step_tokens
        for number in range(32):
            bench.engine.add(request(str(number), prompt_of(CONTEXT, number), 400, adapter=True))
        while any(one.remaining > 1 for one in bench.engine._scheduler.running) or bench.engine.waiting:
            bench.engine.step()
        quiet = [bench.engine.step().duration_s * 1e3 for _ in range(30)]
        for number in range(2):
            bench.engine.add(request(f"long {number}", prompt_of(8000, number), 4, adapter=True))
        steps = min(120, 2 * 8000 // (step_tokens - 32) + 6)
        busy = [bench.engine.step().duration_s * 1e3 for _ in range(steps)]
        for name in [*(str(number) for number in range(32)), "long 0", "long 1"]:
            bench.engine.cancel(name)
        finish(bench.engine)
        found[str(step_tokens)] = {"quiet_ms": quantiles(quiet[2:]), "busy_ms": quantiles(busy[2:])}
    bench.engine._scheduler.step_tokens = bench.engine.config.step_tokens
    return found


def swap(bench: Bench) -> Result:
    """A new version loaded and published between two steps of 64 streams."""
    engine = bench.engine
    on_host = {name: tensor.cpu() for name, tensor in adapter_tensors(bench.owner.model, 2).items()}
    for number in range(64):
        engine.add(request(str(number), prompt_of(CONTEXT, number), 100, adapter=True))
    quiet = timed_steps(engine, 20)[4:]
    result: Result = {"quiet_ms": quantiles(quiet)}
    with ThreadPoolExecutor(1) as pool:
        for version in ("2", "3"):
            started_s = time.perf_counter()
            moving = pool.submit(upload_all, on_host, engine_device(engine))
            during = [engine.step().duration_s * 1e3]
            while not moving.done():
                during.append(engine.step().duration_s * 1e3)
            moved_s = time.perf_counter()
            ref = AdapterRef(ADAPTER.name, version)
            engine.load_adapter(ref, moving.result(), RANK, 2.0 * RANK)
            engine.publish(ref)
            live_s = time.perf_counter()
            after = engine.step().duration_s
            result[version] = {
                "upload_ms": (moved_s - started_s) * 1e3,
                "steps_during_ms": quantiles(during),
                "pause_ms": (live_s - moved_s) * 1e3,
                "pause_and_step_ms": (live_s - moved_s + after) * 1e3,
                "live_after_ms": (live_s - started_s) * 1e3,
            }
    for number in range(64):
        engine.cancel(str(number))
    finish(engine)
    return result


def attention(bench: Bench) -> Result:
    """Microseconds of one paged decode of a layer by how it is tiled, and its error against the first tiling."""
    found: Result = {}
    heads, kv_heads, size, block = 32, 8, 128, 16
    for count, context in ((64, 320), (64, 2000), (256, 320)):
        width = -(-context // block)
        tables = torch.randperm(count * width, device=DEVICE).view(count, width).int()
        keys, values = (
            torch.randn(count * width, block, kv_heads, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)
        )
        query = torch.randn(count, heads, size, device=DEVICE, dtype=torch.bfloat16)
        positions = torch.full((count,), context - 1, device=DEVICE, dtype=torch.int32)
        first: torch.Tensor | None = None
        for tiling in TILINGS:
            micros, out = tiled_us(query, keys, values, tables, positions, tiling)
            first = out if first is None else first
            error = float((out.float() - first.float()).norm() / first.float().norm())
            floor = count * context * kv_heads * size * 4 / 4.17e6
            found[f"{count} x {context}, {tiling}"] = (round(micros, 1), round(floor, 1), error)
    return found


def tiled_us(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    tiling: tuple[int, int, int, int],
) -> tuple[float, torch.Tensor]:
    """(microseconds, result) of keys a step, stages, warps and splits."""
    from collm_replica.engine import kernels

    tile, stages, warps, splits = tiling
    (count, heads, size), (_, block, kv_heads, _) = query.shape, keys.shape
    out = torch.empty_like(query)
    part, stat = (torch.empty(count, heads, splits, width, device=DEVICE) for width in (size, 2))

    def act() -> None:
        kernels.paged_decode[count, kv_heads, splits](
            query, keys, values, tables, tables.stride(0), positions, out, part, stat, size**-0.5, H=heads,
            KV=kv_heads, D=size, BLOCK=block, WINDOW=0, SPLITS=splits, G=16, BN=tile, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        if splits > 1:
            kernels.combine[(count * heads,)](part, stat, out, D=size, SPLITS=splits, num_warps=2)

    act()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            act()
    return event_ms(graph.replay, 10) * 1e3 / 20, out


def engine_device(engine: Engine) -> torch.device:
    """Where it computes."""
    backend: Any = engine._backend
    device: torch.device = backend._device
    return device


def profile(bench: Bench) -> Result:
    """Microseconds of each kernel in one step at n = 1 and 64, with and without adapters."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    found: Result = {}
    for count in (1, 64):
        for adapter in (False, True):
            graph = bench.graph(count, adapter)
            with record(activities=[ProfilerActivity.CUDA]) as recorder:
                graph.replay()
                torch.cuda.synchronize()
            rows = [row for row in recorder.key_averages() if row.device_time_total > 0]
            rows.sort(key=lambda row: -row.device_time_total)
            found[f"{count}{' with adapters' if adapter else ''}"] = [
                (row.key[:100], row.count, round(row.device_time_total, 1)) for row in rows[:16]
            ]
    return found


def start_up(bench: Bench) -> Result:
    """Safetensors in the page cache into device memory."""
    from safetensors.torch import save_file

    folder = model_folder(bench.scratch / "files", 4)
    model: Any = skeleton(folder, torch.bfloat16)
    save_file(
        {
            name: torch.randn(tensor.shape, dtype=torch.bfloat16, device=DEVICE).cpu()
            for name, tensor in model.named_parameters()
        },
        folder / "model.safetensors",
    )
    times = []
    for _ in range(2):
        started_s = time.perf_counter()
        owner = weights.DeviceWeights(folder, torch.bfloat16)
        times.append(time.perf_counter() - started_s)
        size = owner.flat.nbytes
        del owner
    return {"gb_s": size / min(times) / 1e9, "bytes": size, "seconds_for_16_gb": 16e9 / (size / min(times))}


def beside(bench: Bench) -> Result:
    """Decode steps next to a trainer on the same weights: taking turns, and under MPS by the trainer's SM share."""
    found: Result = {}
    for mode in ("mps 30", "turns", "mps 100"):
        if time.perf_counter() > bench.deadline_s - MODE_S:
            found[mode] = {"skipped": "no time left"}
            continue
        folder = Path(tempfile.mkdtemp(prefix="collm-mps-", dir="/tmp"))
        mps = Mps(folder)
        environment = dict(os.environ)
        started = False
        try:
            if mode != "turns":
                mps.start()
                started = True
                environment |= mps.environment
            command = [
                sys.executable,
                __file__,
                "--inference",
                mode.removeprefix("mps "),
                "--layers",
                str(bench.layers),
            ]
            output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
            lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
            found[mode] = json.loads(lines[-1]) if lines else {"error": (output.stdout + output.stderr)[-3000:]}
        except (MpsError, subprocess.TimeoutExpired) as error:
            found[mode] = {"error": str(error)[-2000:]}
        finally:
            if started:
                mps.stop()
        bench.save("beside", found)
    return found


# --- the two processes of `beside`


def inference_process(share: str, layers: int, scratch: Path) -> Result:
    """Owns the weights, starts the trainer, times steps alone and beside it."""
    owner = Owner(model_folder(scratch / "model", layers))
    engine = engine_on(owner, max_batch=64, kv_bytes=24 << 30, context_tokens=2048)
    (scratch / "export").write_bytes(owner.export())
    environment = dict(os.environ) | ({} if share == "turns" else {SHARE: share})
    command = [sys.executable, __file__, "--trainer", str(scratch), "--layers", str(layers)]
    rows: Result = {"alone": beside_rows(engine)}
    free = torch.cuda.mem_get_info()[0]
    trainer: Any = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        rows["attach"] = json.loads(next_json(trainer))
        for batch in (4, 16):
            print(batch, file=trainer.stdin, flush=True)
            next_json(trainer)
            row = beside_rows(engine)
            print(0, file=trainer.stdin, flush=True)
            row["trainer"] = json.loads(next_json(trainer))
            row["memory_gb"] = (free - torch.cuda.mem_get_info()[0]) / 1e9
            rows[f"B={batch}"] = row
    finally:
        trainer.kill()
        trainer.wait()
    rows["after kill -9"] = beside_rows(engine)
    return rows


def next_json(process: Any) -> str:
    """The next line of JSON that it prints. Raises EOFError when it is gone."""
    for line in process.stdout:
        if line.startswith("{"):
            return str(line)
    raise EOFError(f"the trainer ended with {process.poll()}")


def beside_rows(engine: Engine, seconds: float = 4.0) -> Result:
    """Decode steps for some seconds at n = 64, SM activity beside them, and one prefill of 2,048 tokens."""
    try:
        gpm: Any = GpmUtilisation(0)
    except Exception as error:  # NVML's own family of errors; the row then says so
        gpm = error
    for number in range(64):
        engine.add(request(str(number), prompt_of(CONTEXT, number), 1600, adapter=True))
    timed_steps(engine, 10)
    if isinstance(gpm, GpmUtilisation):
        gpm.read(0.0)
    durations, until_s = [], time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        durations.append(engine.step().duration_s * 1e3)
    activity = gpm.read(0.0) if isinstance(gpm, GpmUtilisation) else str(gpm)
    for number in range(64):
        engine.cancel(str(number))
    finish(engine)
    return {"step_ms": quantiles(durations), "sm_activity": activity}


def trainer_process(scratch: Path, layers: int) -> None:
    """Attaches to the weights, then trains B x 256 tokens a step while its input says a B above 0."""
    torch.zeros(1, device=DEVICE)
    before = torch.cuda.mem_get_info()[0]
    started_s = time.perf_counter()
    views, _ = weights.attach_device((scratch / "export").read_bytes())
    model = weights.assemble(skeleton(scratch / "model", torch.bfloat16), views)
    taken = before - torch.cuda.mem_get_info()[0]
    print(json.dumps({"attach_s": time.perf_counter() - started_s, "bytes": taken}), flush=True)
    lora = Lora(model, RANK, 2.0 * RANK)
    lora.load(lora.fresh(0))
    lora.model.gradient_checkpointing_enable({"use_reentrant": False})
    lora.model.enable_input_require_grads()
    lora.model.train()
    optimizer = torch.optim.AdamW(lora.parameters, lr=1e-4)
    batch, pending, times = 0, "", list[float]()
    while True:
        if select.select([0], [], [], 0.0 if batch else 0.05)[0]:
            pending += os.read(0, 64).decode()
        while "\n" in pending:
            line, pending = pending.split("\n", 1)
            if int(line):
                batch, times = int(line), []
                for _ in range(2):
                    train_step(lora, optimizer, batch)
                print(json.dumps({"warm": batch}), flush=True)
            else:
                batch = 0
                peak = torch.cuda.max_memory_allocated()
                print(json.dumps({"step_ms": quantiles(times or [math.nan]), "peak_bytes": peak}), flush=True)
        if batch:
            started_s = time.perf_counter()
            train_step(lora, optimizer, batch)
            times.append((time.perf_counter() - started_s) * 1e3)


def train_step(lora: Lora, optimizer: torch.optim.Optimizer, batch: int) -> None:
    """One step of B x 256 random tokens, to its end on the device."""
    ids = torch.randint(0, 1000, (batch, 256), device=DEVICE)
    torch.autograd.backward(lora.model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()


# --- all


class Bench:
    """What the parts share; the full model and its engine are made once, when first needed."""

    def __init__(self, layers: int, out: Path, scratch: Path, budget_s: float) -> None:
        self.layers, self.out, self.scratch = layers, out, scratch
        self.deadline_s = time.perf_counter() + budget_s
        device = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
        self.results: Result = json.loads(out.read_text()) if out.exists() else {}
        self.results |= {"torch": torch.__version__, "device": device, "layers": layers}
        self._engine: Engine | None = None
        self._owner: Owner | None = None

    @property
    def owner(self) -> Owner:
        """The full model."""
        if self._owner is None:
            self._owner = Owner(model_folder(self.scratch / "full", self.layers))
        return self._owner

    @property
    def engine(self) -> Engine:
        """On the full model."""
        if self._engine is None:
            started_s = time.perf_counter()
            self._engine = engine_on(self.owner)
            self.results["engine_start_s"] = time.perf_counter() - started_s
            self.results["memory_gb"] = torch.cuda.memory_reserved() / 1e9
        return self._engine

    @property
    def weight_bytes(self) -> int:
        """Read by every decode step: all weights but the embedding, whose rows are few."""
        names = self.owner.manifest.places
        return sum(2 * math.prod(place.shape) for name, place in names.items() if "embed" not in name)

    def graph(self, count: int, adapter: bool) -> Any:
        """The captured step of a bucket."""
        backend: Any = self.engine._backend
        return backend._graphs._graphs[count, adapter].graph

    def save(self, name: str, result: object) -> None:
        """Into the file, at once."""
        self.results[name] = result
        self.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def release(self) -> None:
        """Give the memory of the full model back."""
        self._engine = self._owner = None
        gc.collect()
        torch.cuda.empty_cache()


ALL = (ceilings, correct, decode, identical, throughput, swap, prefill, stalls, start_up, profile, attention, beside)
PARTS: dict[str, Callable[[Bench], Result]] = {part.__name__: part for part in ALL}


def run(bench: Bench, parts: Sequence[str]) -> int:
    """Every part that begins in time; how many failed. A device that a part broke is left to a new process."""
    failed = 0
    for index, name in enumerate(parts):
        begun_s = time.perf_counter()
        if begun_s > bench.deadline_s:
            bench.save(name, {"skipped": "no time left"})
            continue
        if name == "beside":
            bench.release()
        try:
            bench.save(name, PARTS[name](bench))
        except Exception:
            failed += 1
            bench.save(name, {"traceback": traceback.format_exc()[-4000:]})
        spent_s = time.perf_counter() - begun_s
        print(f"== {name} ({spent_s:.1f} s)\n{json.dumps(bench.results[name])[:2400]}", flush=True)
        if "CUDA error" in bench.results[name].get("traceback", "") and parts[index + 1 :]:
            left_s = str(bench.deadline_s - time.perf_counter())
            again = ["--layers", str(bench.layers), "--out", str(bench.out), "--budget-s", left_s, "--parts"]
            return (
                failed + subprocess.run([sys.executable, __file__, *again, *parts[index + 1 :]], check=False).returncode
            )
    return failed


def main() -> None:
    """Exit status 1 if a part failed."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("engine.json"))
    parser.add_argument("--budget-s", type=float, default=math.inf, help="begin no part after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether the bench itself runs")
    parser.add_argument("--inference", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        SHAPE.update(TINY)
    if arguments.trainer is not None:
        trainer_process(arguments.trainer, arguments.layers)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.inference is not None:
            print(json.dumps(inference_process(arguments.inference, arguments.layers, Path(scratch))), flush=True)
            return
        failed = run(Bench(arguments.layers, arguments.out, Path(scratch), arguments.budget_s), arguments.parts)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
