"""Adapters that clients load and unload while a replica with a real, tiny model serves."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis.asyncio import Redis
from safetensors.torch import save_file

from collm_common.errors import AdapterError
from collm_common.keys import Keys
from collm_dispatcher.ingress import peft_folder
from collm_dispatcher.ingress.peft_folder import CONFIG, TENSORS
from tests.engine.harness import generate, load, with_adapter
from tests.ingress.real import real_front
from tests.ingress.support import Front, text
from tests.support.models import byte_tokenizer, random_adapter, tiny_model_folder
from tests.support.waiting import eventually

TEXT, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama")


def save(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    folder.mkdir(parents=True)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "base_model_name_or_path": "org/tiny"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")


async def answer(site: Front, name: str) -> tuple[int, Any]:
    body = text(PROMPT, model=name, max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    status, found = await site.post(TEXT, body)
    return status, found["choices"][0]["text"] if status == 200 else found["error"]["code"]


def wanted(tokens: list[int]) -> str:
    return str(byte_tokenizer().decode(tokens, skip_special_tokens=True))


async def test_an_adapter_from_outside_answers_as_under_peft(
    redis: Redis, keys: Keys, model: Path, tmp_path: Path
) -> None:
    """Catches a wrong scale, a name that is known too early or too late, and a version that cannot be pinned."""
    first, second = (random_adapter(model, 4, 8.0, seed=seed) for seed in (1, 2))
    save(tmp_path / "one", first)
    save(tmp_path / "two", second, use_rslora=True, lora_alpha=4)
    async with real_front(redis, keys, model, adapter_dir=str(tmp_path)) as (site, _):
        assert (await answer(site, "mine"))[0] == 404
        status, loaded = await site.post(LOAD, {"lora_name": "mine", "lora_path": "one"})
        assert (status, loaded["root"]) == (200, "mine@v1")
        assert await answer(site, "mine") == (200, wanted(generate(with_adapter(model, first, 4, 8), PROMPT, 8)))
        again = await site.post(LOAD, {"lora_name": "mine", "lora_path": "two"})
        assert (again[0], again[1]["error"]["param"]) == (400, "lora_name")
        status, loaded = await site.post(LOAD, {"lora_name": "mine", "lora_path": "two", "load_inplace": True})
        assert (status, loaded["version"]) == (200, 2)
        newer = wanted(generate(with_adapter(model, second, 4, 8), PROMPT, 8))
        await eventually(lambda: _answers(site, "mine", newer))
        assert await answer(site, "mine@v1") == (200, wanted(generate(with_adapter(model, first, 4, 8), PROMPT, 8)))
        _, listing = await site.get("/v1/models")
        entry = next(entry for entry in listing["data"] if entry["id"] == "mine")
        assert (entry["parent"], entry["root"], entry["version"]) == ("m", "mine@v2", 2)
        assert (await site.get("/v1/models/mine"))[1] == entry
        assert (await site.get("/v1/models/none"))[0] == 404


async def _answers(site: Front, name: str, told: str) -> bool:
    return await answer(site, name) == (200, told)


async def test_an_unloaded_adapter_is_gone_and_its_versions_never_come_back(
    redis: Redis, keys: Keys, model: Path, tmp_path: Path
) -> None:
    """Catches an adapter that answers after it was unloaded, and a version number that stands for two adapters."""
    save(tmp_path / "one", random_adapter(model, 4, 8.0))
    async with real_front(redis, keys, model, adapter_dir=str(tmp_path)) as (site, serving):
        await site.post(LOAD, {"lora_name": "mine", "lora_path": "one"})
        await eventually(lambda: "mine" in serving.engine.versions)
        assert (await site.post(UNLOAD, {"lora_name": "mine"}))[0] == 200
        assert await answer(site, "mine") == (404, "model_not_found")
        await eventually(lambda: "mine" not in serving.engine.versions)
        assert not await redis.exists(keys.adapter_version("mine", 1))
        assert (await site.post(UNLOAD, {"lora_name": "mine"}))[0] == 404
        _, loaded = await site.post(LOAD, {"lora_name": "mine", "lora_path": "one"})
        assert loaded["root"] == "mine@v2"


def poisoned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.fill_(float("nan")) if i == 3 else tensor for i, (name, tensor) in enumerate(tensors.items())}


Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
SHORT: Change = lambda tensors: {name: tensor[..., :-1].contiguous() for name, tensor in tensors.items()}  # noqa: E731
HALF: Change = lambda tensors: dict(list(tensors.items())[:-1])  # noqa: E731
FOREIGN: Change = lambda tensors: {name.replace("q_proj", "qq_proj"): each for name, each in tensors.items()}  # noqa: E731
HEAD: Change = lambda tensors: tensors | {"base_model.model.lm_head.weight": torch.zeros(4, 4)}  # noqa: E731


@pytest.mark.parametrize(
    ("change", "config", "named"),
    [
        (poisoned, {}, "not finite"),
        (SHORT, {}, "shape"),
        (HALF, {}, "lora_B"),
        (FOREIGN, {}, "qq_proj"),
        (HEAD, {}, "lm_head"),
        (dict, {"r": 8}, "rank 8"),
        (dict, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (dict, {"use_dora": True}, "use_dora"),
        (dict, {"peft_type": "IA3"}, "peft_type"),
        (dict, {"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        (dict, {"r": 0}, "`$.r`"),
        (dict, {"lora_alpha": 1e308}, "lora_alpha"),
        (lambda tensors: {}, {}, "no tensors"),
    ],
)
async def test_what_does_not_fit_is_refused_by_name_and_leaves_nothing(
    redis: Redis, keys: Keys, model: Path, tmp_path: Path, change: Change, config: dict[str, Any], named: str
) -> None:
    """Catches an adapter that breaks the batch it runs in, and a name half loaded after a failed check."""
    save(tmp_path / "bad", change(random_adapter(model, 4, 8.0)), **config)
    async with real_front(redis, keys, model, adapter_dir=str(tmp_path)) as (site, serving):
        status, body = await site.post(LOAD, {"lora_name": "bad", "lora_path": "bad"})
        assert (status, body["error"]["code"], body["error"]["param"]) == (400, "adapter_unfit", "lora_path")
        assert named in body["error"]["message"]
        assert await answer(site, "bad") == (404, "model_not_found")
        assert await answer(site, "m") == (200, wanted(generate(load(model), PROMPT, 8)))
        assert serving.engine.versions == {}
    assert not [key async for key in redis.scan_iter(f"{keys.adapter('bad')}:v*")]
    assert not await redis.sismember(keys.adapters, "bad")


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_only_files_that_lie_in_the_folder_are_read(tmp_path: Path, model: Path, name: str) -> None:
    """Catches a link to a file that clients may not see, a pipe that nobody ever writes to, and a file of any size."""
    folder = tmp_path / "one"
    save(folder, random_adapter(model, 4, 8.0))
    assert peft_folder.read(folder, 1 << 20).rank == 4
    file, elsewhere = folder / name, tmp_path / "elsewhere"
    size = file.stat().st_size
    file.rename(elsewhere)
    with pytest.raises(AdapterError, match=f"{name}: cannot be read in one: No such file"):
        peft_folder.read(folder, 1 << 20)
    file.symlink_to(elsewhere)
    with pytest.raises(AdapterError, match=f"{name}: is a symbolic link"):
        peft_folder.read(folder, 1 << 20)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(AdapterError, match=f"{name}: is no file"):
        peft_folder.read(folder, 1 << 20)
    file.unlink()
    elsewhere.rename(file)
    if name == TENSORS:
        with pytest.raises(AdapterError, match=f"{name}: has {size} bytes, the limit is {size - 1}"):
            peft_folder.read(folder, size - 1)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "m", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x@v3", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "../../etc"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "nothing"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "link"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "loop"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "pipe"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "deep"}, 400, "lora_path"),
        ({"lora_name": "x\n", "lora_path": "one"}, 400, "lora_name"),
        ({"lora_name": "x", "lora_path": "one", "base_model_name": "other"}, 404, "base_model_name"),
    ],
)
async def test_bad_loads_name_their_field(
    redis: Redis, keys: Keys, model: Path, tmp_path: Path, body: dict[str, Any], status: int, param: str
) -> None:
    """Catches a path that leaves the folder, is none or never ends, and a served model hidden behind an adapter."""
    root = tmp_path / "adapters"
    save(root / "one", random_adapter(model, 4, 8.0))
    (root / "link").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    for name in ("pipe", "deep"):
        (root / name).mkdir()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "deep" / "adapter_config.json").write_text('{"rank_pattern":' + '{"a":' * 100_000)
    async with real_front(redis, keys, model, adapter_dir=str(root)) as (site, _):
        found, answered = await site.post(LOAD, body)
    assert (found, answered["error"]["param"]) == (status, param)


async def test_without_a_folder_nothing_can_be_changed(redis: Redis, keys: Keys, model: Path) -> None:
    """Catches an admin's power that every client has by default."""
    async with real_front(redis, keys, model) as (site, _):
        answers = [await site.post(path, {"lora_name": "x", "lora_path": "x"}) for path in (LOAD, UNLOAD)]
    assert [(status, body["error"]["code"]) for status, body in answers] == [(403, "runtime_adapters_off")] * 2


async def test_one_name_is_changed_by_one_at_a_time(redis: Redis, keys: Keys, model: Path, tmp_path: Path) -> None:
    """Catches two loads of a name that both succeed, and an adapter that changes under a job that trains it."""
    save(tmp_path / "one", random_adapter(model, 4, 8.0))
    async with real_front(redis, keys, model, adapter_dir=str(tmp_path)) as (site, _):
        load_it = {"lora_name": "mine", "lora_path": "one"}
        both = await asyncio.gather(site.post(LOAD, load_it), site.post(LOAD, load_it))
        assert sorted(status for status, _ in both) in ([200, 400], [200, 409])
        await redis.hset(keys.job("j1"), "adapter", "mine")
        await redis.sadd(keys.jobs, "j1")
        status, body = await site.post(UNLOAD, {"lora_name": "mine"})
    assert (status, body["error"]["code"]) == (409, "conflict")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
