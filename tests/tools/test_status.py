"""`collm status` and the command line, against a populated broker."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from aiohttp.test_utils import TestServer
from redis.asyncio import Redis
from rich.console import Console

from collm_common.keys import Keys
from collm_common.lookback import throughput
from collm_common.messages import encode, kind
from collm_common.registry import Registry
from collm_common.streams import append
from collm_common.types import ReplicaState
from collm_common.wording import event_line
from collm_tools.cli import main, parser
from collm_tools.commands.status import watch
from collm_tools.status.snapshot import figures, take
from collm_tools.status.view import render, replicas
from collm_tools.story import say
from tests.support.broker import Broker
from tests.support.waiting import eventually
from tests.tools import cell


async def populate(redis: Redis, keys: Keys, job: bool = True) -> None:
    """Two live replicas, one dead one; one queue; a job."""
    now = time.time()
    registry = Registry(redis, keys)
    for replica in ("r1", "r2", "r3"):
        await registry.register(cell.info(replica, state=ReplicaState.IDLE), 60)
    await redis.delete(keys.lease("r3"))
    for replica in ("r1", "r2"):
        said = cell.report(replica, now)
        await append(redis, keys.telemetry, kind(said), replica, encode(said))
    for event in cell.events(now - 100)[:-1]:
        await append(redis, keys.events, kind(event), "e", encode(event))
    await redis.sadd(keys.streams, "m|chat")
    for key in (keys.requests("m", "chat"), keys.subflow("r1")):
        await append(redis, key, "request", "x", b"")
    if job:
        await redis.sadd(keys.jobs, "j1")


def drawn(item: object, width: int = 220) -> str:
    console = Console(record=True, width=width)
    console.print(item)
    return console.export_text()


async def test_a_snapshot_shows_what_the_broker_knows(redis: Redis, keys: Keys) -> None:
    """Catches dead replicas shown as ready, and queues read from the wrong stream."""
    await populate(redis, keys)
    async with TestServer(cell.Service().app()) as server:
        snapshot = await take(redis, keys, str(server.make_url("")))
    assert [(row.info.id, row.subflow) for row in snapshot.replicas] == [("r1", 1), ("r2", 0), ("r3", 0)]
    assert [(queue.slo, queue.length) for queue in snapshot.queues] == [("chat", 1)]
    assert snapshot.tokens_per_s == pytest.approx(4.0)
    assert snapshot.figures == {'collm:slo_attainment{model="m"}': 0.75}
    text = drawn(render(snapshot))
    for word in ("desk@v2", "dead", "idle", "1 waiting", "slo_attainment", "job j1: running, round 1"):
        assert word in text


async def test_the_table_fits_into_a_small_terminal(redis: Redis, keys: Keys) -> None:
    """Catches columns too narrow to read in 80 characters."""
    await populate(redis, keys)
    text = drawn(replicas(await take(redis, keys), "m"), width=80)
    assert "…" not in text
    assert all(name in text for name in ("running", "limit", "train", "queue", "idle", "dead"))


async def test_ended_jobs_are_not_shown_as_running(redis: Redis, keys: Keys) -> None:
    """Catches jobs that stay on the screen for ever."""
    await populate(redis, keys, job=False)
    assert (await take(redis, keys)).jobs == ()


async def test_an_empty_cell_is_no_error(redis: Redis, keys: Keys) -> None:
    """Catches a crash before the first replica is there, or without the HTTP service."""
    snapshot = await take(redis, keys, "http://127.0.0.1:9")
    assert (snapshot.replicas, snapshot.figures) == ((), {})
    assert "tokens/s" in drawn(render(snapshot))


def test_throughput_forgets_old_reports() -> None:
    """Catches a rate that never falls again."""
    reports = [cell.report("r1", 100.0), cell.report("r1", 50.0)]
    assert throughput(reports, 101.0) == 2.0


def test_only_goodput_and_attainment_are_taken_from_metrics() -> None:
    """Catches a page of histograms, or a counter's birth date, among the serving figures."""
    page = "# HELP collm:goodput_x y\ncollm:goodput_x 1.5\ncollm:queue 3\ncollm:goodput_created 1.7e+09\n"
    assert figures(page) == {"collm:goodput_x": 1.5}


def test_every_event_is_one_line() -> None:
    """Catches an event kind without words."""
    lines = [event_line(event) for event in cell.events()]
    assert lines[1] == "r1: serving -> idle (quiet)"
    assert lines[3] == "job j1: r1 sent its update of round 1 (8 samples, loss 2.000)"
    assert "desk@v1 published (held-out 3.000 -> 2.000)" in lines
    assert not any("\n" in line for line in lines)


def test_what_is_said_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command broken over two lines, which cannot be copied, and brackets that vanish as markup."""
    text = f"curl {'x' * 200} [bold] [/]"
    say(Console(width=80), text)
    assert capsys.readouterr().out == text + "\n"


async def test_status_as_json_and_once(
    redis: Redis, keys: Keys, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches output that a script cannot read."""
    await populate(redis, keys)
    common = ["status", "--redis", broker.url, "--url", ""]
    assert await asyncio.to_thread(main, [*common, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replicas"][0]["info"]["id"] == "r1"
    assert await asyncio.to_thread(main, [*common, "--once"]) == 0
    assert "r1" in capsys.readouterr().out


async def test_the_live_view_ends_quietly(
    redis: Redis, keys: Keys, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback on Ctrl-C, and a table that is drawn once only."""
    arguments = parser().parse_args(["status", "--redis", broker.url, "--url", "", "--every", "0.01"])
    live = asyncio.create_task(watch(arguments))
    calls = "cmdstat_smembers"
    await redis.config_resetstat()
    await eventually(lambda: looked_at(redis, calls))
    live.cancel()
    assert await live == 0


async def looked_at(redis: Redis, calls: str) -> bool:
    """Whether the registry was read at least three times."""
    found = await redis.info("commandstats")
    return bool(found.get(calls, {}).get("calls", 0) >= 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["status", "--once", "--redis", "redis://127.0.0.1:9/0"], "no broker at redis://127.0.0.1:9/0"),
        (["status", "--once", "--redis", "nonsense"], "nonsense"),
        (["load", "--model", "m", "--trace", "gone.csv"], "no such file: gone.csv"),
        (["load", "--model", "m", "--duration", "0.0001"], "no request arrives"),
        (["demo", "--model", "m", "--prompts", "gone.jsonl"], "no such file: gone.jsonl"),
        (["up", "--model", "m", "--data", "a", "--replicas", "2"], "1 folders for 2 replicas"),
    ],
)
def test_a_known_error_is_one_clear_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches tracebacks shown to users."""
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert message in said
    assert said.startswith("collm: ")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["load", "--model", "m", "--rate", "-1"], "must be a number > 0, is '-1'"),
        (["load", "--model", "m", "--rate", "x"], "must be a number > 0, is 'x'"),
        (["load", "--model", "m", "--max-tokens", "0"], "must be a whole number >= 1"),
        (["up", "--port", "70000"], "port in 0..65535"),
        (["dance"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_bad_argument_names_its_limit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an argument error without the limit."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["up", "demo", "status", "load"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a help text that argparse cannot format."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "usage: collm" in capsys.readouterr().out
