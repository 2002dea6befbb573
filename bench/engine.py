"""The engine on a GPU: is it right, and how far from the memory's speed.

Random weights in the shapes of Llama-3.1-8B (or of `--layers` of its layers). Every part runs even if another fails;
results go to a JSON file after each, next to those of earlier runs.
What a trainer beside it costs is `bench/beside.py`.
"""

from __future__ import annotations

import argparse
import json
import math
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_model import (
    ADAPTER,
    CONTEXT,
    DEVICE,
    RANK,
    SHAPE,
    TINY,
    Owner,
    Result,
    adapter_tensors,
    engine_on,
    finish,
    model_folder,
    prompt_of,
    quantiles,
    request,
)  # fmt: skip
from collm_common.types import AdapterRef
from collm_replica import weights
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.engine import Engine
from collm_replica.models import load_tokenizer, skeleton
from tests.support.models import random_adapter, tiny_model_folder

SIZES = (1, 16, 64, 256)
TILINGS = ((64, 3, 4, 1), (64, 2, 4, 1), (128, 2, 4, 1), (128, 3, 8, 1), (32, 4, 2, 1), (64, 3, 2, 1), (64, 3, 4, 2))
PROMPTS, LENGTHS, TRAIN_STEPS = 120, (17, 45), 250


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
    """Greedy answers in bfloat16: fused, one step ahead, against `generate` and plain.

    By small models that were trained for a moment, and by `--model`. `float32_as_generate` says how many answers the
    precision alone leaves the same.
    """
    folders = {family: trained_model(bench.scratch / family, family) for family in ("llama", "qwen3")}
    if bench.model is not None:
        folders["model"] = bench.model
    return {name: answers_compared(folder) for name, folder in folders.items()}


def answers_compared(folder: Path) -> Result:
    """Shares of the prompts whose answers are the same, token for token."""
    adapter = random_adapter(folder, 8, 16.0, seed=1)
    config = EngineConfig(max_batch=16, slots=3, max_rank=8, context_tokens=256, kv_bytes=2**28, step_tokens=128)
    tokenizer: Any = load_tokenizer(folder)
    text = tokenizer(corpus().decode(), add_special_tokens=False).input_ids
    load: Any = AutoModelForCausalLM.from_pretrained
    answers: dict[str, dict[str, list[int]]] = {}
    for name, way in (("fused", {"fused": True, "run_ahead": True}), ("plain", {})):
        engine = Engine(load(folder, dtype=torch.bfloat16).to(DEVICE), tokenizer, EngineConfig(**vars(config) | way))
        engine.load_adapter(engine.stage(ADAPTER, adapter, 8, 16.0))
        engine.publish(ADAPTER)
        for number in range(PROMPTS):
            prompt = piece(text, LENGTHS[number % 2], number)
            engine.add(request(str(number), prompt, 24, adapter=number % 3 == 0))
        answers[name] = finish(engine)
    wide, reference = (load(folder, dtype=dtype).to(DEVICE).eval() for dtype in (torch.float32, torch.bfloat16))
    wanted, precise = (generate_all(model, text) for model in (reference, wide))

    def same(these: dict[str, list[int]], those: dict[str, list[int]]) -> float:
        return sum(these[name] == tokens for name, tokens in those.items()) / len(those)

    return {
        "prompts_as_generate": same(answers["fused"], wanted),
        "plain_as_generate": same(answers["plain"], wanted),
        "float32_as_generate": same(precise, wanted),
        "prompts_as_plain": same(answers["fused"], answers["plain"]),
    }


def corpus() -> bytes:
    """Text: this repository's own."""
    root = Path(__file__).resolve().parents[1]
    return b"".join(path.read_bytes() for path in sorted(root.glob("services/replica/collm_replica/**/*.py")))


def piece(tokens: Sequence[int], length: int, seed: int) -> list[int]:
    """A part of the corpus."""
    start = int(torch.randint(0, len(tokens) - length, (1,), generator=torch.Generator().manual_seed(seed)))
    return list(tokens[start : start + length])


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


def generate_all(model: Any, text: Sequence[int]) -> dict[str, list[int]]:
    """The answers to the prompts without an adapter, those of one length as one batch."""
    answers: dict[str, list[int]] = {}
    for parity, length in enumerate(LENGTHS):
        numbers = [number for number in range(parity, PROMPTS, 2) if number % 3]
        tokens = generate(model, [piece(text, length, number) for number in numbers])
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
    """Requests of 256 in and 128 out, all at once, to the last token, in tokens a second; the first run warms up."""
    rates: Result = {}
    for count in (64, 256):
        for adapter in (False, True):
            found = []
            for turn in range(4):
                for number in range(count):
                    # Not the prompts of the run before: their keys and values may still be there.
                    prompt = prompt_of(256, 1000 * turn + number)
                    bench.engine.add(request(str(number), prompt, 128, adapter))
                started_s = time.perf_counter()
                answers = finish(bench.engine)
                found.append(count * 128 / (time.perf_counter() - started_s))
                assert sum(map(len, answers.values())) == count * 128
            rates[f"{count}{' with adapters' if adapter else ''}"] = {
                "median": statistics.median(found[1:]),
                "all": found,
            }
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
            for turn in range(3):
                for number in range(count):
                    bench.engine.add(request(str(number), prompt_of(length, 1000 * turn + number), 1, adapter))
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
            # Not the prompts of the size before: their keys and values may still be there.
            prompt = prompt_of(8000, 1000 * step_tokens + number)
            bench.engine.add(request(f"long {number}", prompt, 4, adapter=True))
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
            moving = pool.submit(engine.stage, AdapterRef(ADAPTER.name, version), on_host, RANK, 2.0 * RANK)
            during = [engine.step().duration_s * 1e3]
            while not moving.done():
                during.append(engine.step().duration_s * 1e3)
            moved_s = time.perf_counter()
            staged = moving.result()
            engine.load_adapter(staged)
            engine.publish(staged.ref)
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


# --- all


class Bench:
    """What the parts share; the full model and its engine are made once, when first needed."""

    def __init__(self, layers: int, out: Path, scratch: Path, budget_s: float, model: Path | None = None) -> None:
        self.layers, self.out, self.scratch, self.model = layers, out, scratch, model
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


ALL = (ceilings, correct, decode, identical, throughput, swap, prefill, stalls, start_up, profile, attention)
PARTS: dict[str, Callable[[Bench], Result]] = {part.__name__: part for part in ALL}


def run(bench: Bench, parts: Sequence[str]) -> int:
    """Every part that begins in time; how many failed. A device that a part broke is left to a new process."""
    failed = 0
    for index, name in enumerate(parts):
        begun_s = time.perf_counter()
        if begun_s > bench.deadline_s:
            bench.save(name, {"skipped": "no time left"})
            continue
        try:
            bench.save(name, PARTS[name](bench))
        except Exception:
            failed += 1
            bench.save(name, {"traceback": traceback.format_exc()[-4000:]})
        spent_s = time.perf_counter() - begun_s
        print(f"== {name} ({spent_s:.1f} s)\n{json.dumps(bench.results[name])[:2400]}", flush=True)
        if "CUDA error" in bench.results[name].get("traceback", "") and parts[index + 1 :]:
            left_s = str(bench.deadline_s - time.perf_counter())
            again = ["--layers", str(bench.layers), "--out", str(bench.out), "--budget-s", left_s]
            again += ["--model", str(bench.model)] if bench.model else []
            again += ["--parts"]
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
    parser.add_argument("--model", type=Path, help="the answers of this one too, a small one in safetensors")
    arguments = parser.parse_args()
    if arguments.tiny:
        SHAPE.update(TINY)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(arguments.layers, arguments.out, Path(scratch), arguments.budget_s, arguments.model)
        failed = run(bench, arguments.parts)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
