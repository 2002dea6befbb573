"""`collm doctor`: each thing that it should notice, by the thing itself where this machine has it."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo, ReplicaState
from collm_tools.cli import main
from collm_tools.doctor import broker as brokers
from collm_tools.doctor import gpu, machine
from collm_tools.doctor.finding import Finding, State
from tests.support.broker import Broker
from tests.support.users import as_user

GPU = "0, NVIDIA H200, 570.1, 143771, 4, {mode}, {mig}\n"


def states(found: list[Finding]) -> dict[str, State]:
    """What -> how it is."""
    return {finding.what: finding.state for finding in found}


def replica(id_: str, ready: bool = True) -> ReplicaInfo:
    """Of the model `m`."""
    return ReplicaInfo(id_, "m", "i1", ReplicaState.SERVING, ready, infer_batch_max=8, context_tokens=64, alive=True)


def test_this_machine_can_run_the_tests() -> None:
    """A doctor that finds fault with a machine on which everything works."""
    found = machine.look()
    assert [finding for finding in found if finding.state is State.WRONG] == []
    assert all(finding.remedy for finding in found if finding.state is State.NOTE)


def test_what_a_machine_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trouble that shows only under load, or as a traceback an hour later."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1048576 kB\n")
    low = machine.memory(tmp_path / "meminfo")
    assert (low.state, low.said.split(",")[0]) == (State.NOTE, "1.0 GiB available")
    assert machine.memory(tmp_path / "gone").state is State.NOTE
    assert machine.python((3, 10)).state is State.WRONG
    assert machine.python((3, 13)).state is State.NOTE
    assert machine.shared_memory(str(tmp_path / "gone")).state is State.NOTE
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.compiler().state is State.NOTE


@pytest.mark.parametrize(
    ("table", "mps_runs", "state", "remedy"),
    [
        (GPU.format(mode="Default", mig="Disabled"), False, State.OK, ""),
        (GPU.format(mode="Default", mig="[N/A]"), False, State.OK, ""),
        (GPU.format(mode="Exclusive_Process", mig="Disabled"), False, State.WRONG, "-c DEFAULT"),
        (GPU.format(mode="Exclusive_Process", mig="Disabled"), True, State.OK, ""),
        (GPU.format(mode="Prohibited", mig="Disabled"), True, State.WRONG, "-c DEFAULT"),
        (GPU.format(mode="Default", mig="Enabled"), False, State.NOTE, "instance"),
        (GPU.format(mode="Default", mig="Disabled").replace(" 4,", " 140000,"), False, State.NOTE, "another process"),
        ("0, [Unknown Error]\n", False, State.WRONG, "Xid"),
        ("", False, State.WRONG, "--gpus"),
    ],
)
def test_a_gpu_that_two_processes_cannot_share_is_told(table: str, mps_runs: bool, state: State, remedy: str) -> None:
    """A replica whose trainer dies at its first CUDA call, with an error that names no mode."""
    (found,) = gpu.devices(table, mps_runs)
    assert (found.state, remedy in found.remedy) == (state, True)


def test_the_drivers_tools_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that the driver's tools do not understand; a daemon that is taken for none."""

    def tool(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpu.look()[0].said.startswith("no nvidia-smi")
    asked, row = f"--query-gpu={','.join(gpu.FIELDS)}", GPU.format(mode="Default", mig="Disabled").strip()
    tool("nvidia-smi", f'[ "$1" = "{asked}" ] && echo "{row}"')
    monkeypatch.setattr("collm_tools.doctor.gpu.TORCH", "print('2.13', 'None', False, 0)")
    assert states(gpu.look()) == {"gpu 0": State.OK, "mps": State.NOTE, "torch": State.WRONG}
    tool("nvidia-cuda-mps-control", "read command; [ $command = get_server_list ] && echo 17")
    assert "a daemon runs, 1 servers" in next(finding for finding in gpu.look() if finding.what == "mps").said
    tool("nvidia-smi", "echo 'has failed because it could not communicate with the driver'; exit 9")
    (found,) = gpu.look()
    assert (found.state, "communicate" in found.said) == (State.WRONG, True)


async def test_a_broker_and_its_cell_are_judged(redis: Redis, keys: Keys) -> None:
    """A cell in which nobody dispatches, told as one in which all is well."""
    assert states(await brokers.look(redis, keys))["cell"] is State.NOTE
    registry = Registry(redis, keys)
    await registry.register(replica("r1"), 60.0)
    found = states(await brokers.look(redis, keys))
    assert found["broker"] == found["disk"] == found["clock"] == found["cell"] == State.OK
    assert found["dispatcher"] is State.WRONG
    assert found["launcher"] is State.NOTE
    for name in ("launcher", "coordinator", "dispatch:m"):
        await redis.set(keys.lease(name), "somebody", px=60_000)
    async with as_user(redis, "operator") as own:
        assert State.WRONG not in states(await brokers.look(own, keys)).values()


@pytest.mark.parametrize(
    ("changed", "what", "state"),
    [
        ({"redis_version": "6.0.9"}, "broker", State.WRONG),
        ({"role": "slave"}, "role", State.WRONG),
        ({"maxmemory_policy": "allkeys-lru"}, "eviction", State.WRONG),
        ({"aof_last_write_status": "err"}, "disk", State.WRONG),
        ({"aof_enabled": 0}, "disk", State.NOTE),
        ({"maxmemory": 100, "used_memory": 90}, "memory of the broker", State.NOTE),
    ],
)
async def test_a_broker_that_would_lose_something_is_told(
    redis: Redis, changed: dict[str, Any], what: str, state: State
) -> None:
    """Requests that vanish at night, since keys are evicted or nothing is on disk."""
    assert states(brokers.judge(await redis.info() | changed))[what] is state


def test_replicas_that_do_not_answer_are_named() -> None:
    """A count without names, or a cell without any replica that can answer told as half well."""
    held = {"launcher": True}
    some = brokers.cell({"r1": replica("r1"), "r2": replica("r2", ready=False)}, held)[0]
    assert (some.state, "not r2" in some.said) == (State.NOTE, True)
    assert brokers.cell({"r2": replica("r2", ready=False)}, held)[0].state is State.WRONG
    assert (brokers.distance(0.5).state, brokers.clock(-3.0).state) == (State.NOTE, State.NOTE)


async def test_the_command_says_what_it_found(redis: Redis, broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    """An exit status that a script cannot go by."""

    async def doctor(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["doctor", *arguments])

    assert await doctor("--redis", broker.url, "--json") == 0
    assert "broker" in {finding["what"] for finding in json.loads(capsys.readouterr().out)}
    assert await doctor("--redis", "redis://127.0.0.1:9/0") == 1
    assert "wrong" in capsys.readouterr().out
