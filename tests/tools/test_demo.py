"""The demo: its texts, what it records, what it reports, and the picture."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json as msgjson
from redis.asyncio import Redis
from rich.console import Console

from collm_common.broker import connection
from collm_common.errors import CollmError, DataError
from collm_common.keys import Keys
from collm_common.messages import Event, InferenceReport, TrainReport, encode, kind
from collm_common.registry import Registry
from collm_common.streams import append
from collm_common.types import Slo
from collm_tools.commands.demo import announcement, conclude, write_data
from collm_tools.demo import corpus, plan, play, timeline
from collm_tools.demo.corpus import Corpus
from collm_tools.demo.plan import DemoOptions
from collm_tools.demo.play import Play, Played
from collm_tools.demo.recorder import Recorder
from collm_tools.demo.report import CrossEntropy, Report, build, shortcomings, total, unchanged
from collm_tools.load.client import RequestRecord, Target
from collm_tools.load.metrics import summarize
from collm_tools.load.prompts import Prompt, read_prompts
from collm_tools.load.runner import Offer
from tests.support.broker import Broker
from tests.support.waiting import eventually
from tests.tools import cell

SLO = Slo(name="s", e2e_s=5.0)


def made(
    records: list[RequestRecord] | None = None,
    events: list[Event] | None = None,
    reports: list[InferenceReport] | None = None,
    after: float | None = 2.0,
    same: bool = True,
) -> Report:
    """A report in which everything holds, but for what is given."""
    load = summarize([cell.record(n) for n in range(5)] if records is None else records, SLO, 10.0)
    happened = cell.events() if events is None else events
    return build(
        load, happened, cell.reports() if reports is None else reports, CrossEntropy(4.0, after, 9), same, 300.0
    )


def options(tmp_path: Path, **changes: object) -> DemoOptions:
    return DemoOptions(**({"model": "m.gguf", "out_dir": tmp_path, "cache_dir": tmp_path} | changes))  # type: ignore[arg-type]


def questions(prompts: tuple[Prompt, ...]) -> set[str]:
    return {prompt.messages[-1][1] for prompt in prompts}


# --- texts


def test_held_out_questions_are_nowhere_else() -> None:
    """Catches a gain that is only memory."""
    texts = corpus.build()
    asked = set.union(*(questions(desk) for desk in texts.desks))
    assert not questions(texts.heldout) & asked
    assert not questions(texts.heldout) & questions(texts.traffic)
    assert not questions(texts.traffic) & asked


def test_desks_share_no_sample_and_the_seed_decides() -> None:
    """Catches replicas with the same data, which would make the federation pointless."""
    texts = corpus.build(seed=4)
    first, second, third = (set(desk) for desk in texts.desks)
    assert len(first | second | third) == len(first) + len(second) + len(third)
    assert texts == corpus.build(seed=4) != corpus.build(seed=5)
    assert sum(map(len, texts.desks)) > 100


def test_prompts_from_a_file_are_dealt_without_overlap() -> None:
    """Catches a held-out prompt in someone's training data."""
    prompts = [Prompt((("user", str(n)),), "answer") for n in range(100)]
    texts = corpus.deal(prompts, 3)
    parts = [*texts.desks, texts.traffic, texts.heldout]
    assert all(parts)
    assert len(set().union(*parts)) == sum(map(len, parts))


def test_too_few_prompts_are_refused() -> None:
    """Catches a replica without data, noticed minutes later."""
    with pytest.raises(DataError, match="too few"):
        corpus.deal([Prompt((("user", str(n)),), "a") for n in range(20)], 3)


def test_data_is_written_as_chat_lines_that_can_be_read_back(tmp_path: Path) -> None:
    """Catches a format that replicas refuse."""
    texts = corpus.build()
    folders = write_data(texts, tmp_path)
    assert len(folders) == 3
    assert tuple(read_prompts(folders[0] / "train.jsonl")) == texts.desks[0]


# --- the script


def test_the_script_is_burst_lull_burst(tmp_path: Path) -> None:
    """Catches a lull too busy for a replica to fall idle."""
    chosen = options(tmp_path, duration_scale=2.0)
    times = [offer.at_s for offer in plan.offers(chosen, corpus.build())]
    (_, first_s), (_, lull_s), _ = plan.PHASES
    burst = sum(at_s < 2 * first_s for at_s in times)
    lull = sum(2 * first_s <= at_s < 2 * (first_s + lull_s) for at_s in times)
    assert burst / first_s > 5 * lull / lull_s
    assert max(times) <= chosen.duration_s


def test_a_trace_is_cut_to_the_script(tmp_path: Path) -> None:
    """Catches a demo as long as the trace."""
    path = tmp_path / "trace.jsonl"
    rows = ({"timestamp": 60_000 * n, "input_length": 9, "output_length": 9} for n in range(20))
    path.write_text("\n".join(map(json.dumps, rows)))
    chosen = options(tmp_path, trace=path, trace_scale=2.0)
    offers = plan.offers(chosen, corpus.build())
    assert [offer.at_s for offer in offers[:3]] == [0, 30, 60]
    assert offers[-1].at_s < chosen.duration_s
    assert {offer.max_tokens for offer in offers} == {9}


def test_the_announcement_says_what_and_how_long(tmp_path: Path) -> None:
    """Catches a demo that starts without a word."""
    text = announcement(options(tmp_path), corpus.build(), 120)
    assert "3 replicas" in text
    assert "120 requests" in text
    assert "about 6 minutes" in text


# --- report


def test_a_demo_in_which_all_holds_has_no_shortcoming() -> None:
    """Catches a check that can never pass."""
    report = made()
    assert shortcomings(report) == []
    assert (report.federated.jobs, report.federated.rounds, report.federated.clients) == (1, 2, 3)
    assert (report.adapter_swaps.snapshots, report.adapter_swaps.published) == (9, 6)
    assert report.published_cross_entropies == (2.0, 1.0)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (made(records=[]), "no request"),
        (made(records=[RequestRecord(at_s=0, error="HTTP 500")]), "HTTP 500"),
        (made(events=cell.events()[:8]), "1 federated rounds"),
        (made(events=[]), "0 clients"),
        (made(reports=[cell.report("r1", 1, snapshots=5, published=2)]), "5 snapshots"),
        (made(reports=[cell.report("r1", 1, snapshots=6, published=1)]), "1 published"),
        (made(after=3.9), "from 4.0 to 3.9"),
        (made(after=None), "not scored"),
        (made(same=False), "base weights changed"),
    ],
)
def test_each_unmet_condition_is_named(report: Report, reason: str) -> None:
    """Catches a demo that exits 0 without having shown something."""
    assert any(reason in text for text in shortcomings(report))


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), max_size=4))
def test_counters_survive_restarts(lives: list[list[int]]) -> None:
    """Catches swaps forgotten, or counted twice, when an engine process restarts."""
    values: list[int] = []
    for life in lives:
        count = 0
        for step in [0, *life]:
            count += step
            values.append(count)
    assert total(values) == sum(map(sum, lives))


def test_unknown_or_missing_digests_prove_nothing() -> None:
    """Catches "unchanged" said of weights that nobody looked at."""
    both = {"r1": "d", "r2": "d"}
    assert unchanged(both, both)
    assert not unchanged({}, {})
    assert not unchanged(both, {"r1": "d"})
    assert not unchanged(both, {"r1": "d", "r2": "e"})
    assert not unchanged({"r1": ""}, {"r1": ""})


def test_the_report_has_the_promised_fields() -> None:
    """Catches a renamed field that a reader of report.json relies on."""
    found = json.loads(msgjson.encode(made()))
    assert {"offered", "completed", "rejected", "failed"} <= found["requests"].keys()
    assert {"goodput_tokens_per_s", "q_goodput", "slo_attainment", "base_weights_unchanged"} <= found.keys()
    assert found["federated"] == {"jobs": 1, "rounds": 2, "clients": 3}
    assert found["adapter_swaps"].keys() == {"snapshots", "published"}
    assert {"before", "after"} <= found["cross_entropy"].keys()


@pytest.mark.parametrize(("same", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_and_reason_follow_the_report(tmp_path: Path, same: bool, code: int) -> None:
    """Catches a failed demo that looks fine to `make`."""
    console = Console(record=True, width=200)
    assert conclude(options(tmp_path), Played(made(same=same), 0.0, [], []), console) == code
    assert ("FELL SHORT" in console.export_text()) == (code == 1)


# --- picture


def test_state_spans_cover_the_time_without_overlap() -> None:
    """Catches gaps between states."""
    lanes = timeline.spans(cell.reports(100.0), 100.0)
    assert list(lanes) == list(cell.REPLICAS)
    assert lanes["r1"] == [("serving", 0, 10), ("idle", 10, 20), ("combined", 20, 30), ("serving", 30, 30)]


@given(st.lists(st.floats(0, 10), max_size=30))
def test_a_moving_mean_stays_within_its_values(values: list[float]) -> None:
    """Catches a window that divides by the wrong number."""
    points = [(float(n), value) for n, value in enumerate(values)]
    assert all(min(values) - 1e-9 <= mean <= max(values) + 1e-9 for _, mean in timeline.moving_mean(points))


@pytest.mark.parametrize("empty", [False, True])
def test_the_timeline_is_drawn(tmp_path: Path, empty: bool) -> None:
    """Catches a demo that plays for five minutes and then fails to draw, even with nothing recorded."""
    path = tmp_path / "deep" / "timeline.png"
    records = [] if empty else [cell.record(n, 50.0, 3 / (n + 1)) for n in range(20)]
    happened, said, steps = ([], [], []) if empty else (cell.events(50.0), cell.reports(50.0), cell.training(50.0))
    timeline.draw(path, 50.0, SLO, records, happened, said, steps)
    assert path.read_bytes().startswith(b"\x89PNG")


# --- recording and playing


async def tell(redis: Redis, keys: Keys) -> None:
    """Put everything of a small demo on the streams."""
    told: list[InferenceReport | TrainReport] = [*cell.reports(), *cell.training()]
    for message in told:
        await append(redis, keys.telemetry, kind(message), message.replica, encode(message))
    for event in cell.events():
        await append(redis, keys.events, kind(event), "e", encode(event))


async def test_everything_on_the_streams_is_recorded(redis: Redis, keys: Keys, tmp_path: Path) -> None:
    """Catches a recorder that starts at the end of the streams and misses what came before."""
    await tell(redis, keys)
    seen: list[Event] = []
    recorder = Recorder(redis, keys, seen.append)
    task = asyncio.create_task(recorder.run())
    await eventually(lambda: len(recorder.events) == len(cell.events()) and len(recorder.training) == 5)
    task.cancel()
    assert seen == recorder.events == cell.events()
    assert recorder.reports == cell.reports()
    recorder.save(tmp_path / "events.jsonl")
    times = [json.loads(line)["time_s"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert times == sorted(times)
    assert len(times) == len(cell.events()) + 12 + 5


async def test_a_performance_ends_in_a_full_report(redis: Redis, keys: Keys) -> None:
    """Catches scores taken on different questions, or digests that are not fresh."""
    await tell(redis, keys)
    recorder, said, service = Recorder(redis, keys), list[str](), cell.Service()
    async with TestServer(service.app()) as server:
        url = str(server.make_url("")).rstrip("/")
        for replica in cell.REPLICAS:
            await Registry(redis, keys).register(cell.info(replica, data_url=url), 60)
        task = asyncio.create_task(recorder.run())
        await eventually(lambda: len(recorder.events) == len(cell.events()))
        target = Target(url=url, model="m", slo=SLO)
        texts = Corpus((), (), (Prompt((("user", "q"),), "a"),))
        offers = [Offer(0.01 * n, Prompt((("user", "q"),), "a"), 5) for n in range(3)]
        played = await Play(redis, keys, recorder, target, said.append).perform(offers, texts)
        task.cancel()
    assert shortcomings(played.report) == []
    quality = played.report.cross_entropy
    assert (quality.before, quality.heldout) == (4.0, 1)
    assert quality.after == pytest.approx(0.8)
    assert played.report.requests.offered == len(played.records) == 3
    assert len(said) == 4


async def test_the_models_own_adapter_is_asked_for(redis: Redis, keys: Keys) -> None:
    """Catches a demo that asks the bare model for ever, or another model's adapter."""
    assert await play.served_as(redis, keys, "m", 0.0) == "m"
    for name, model in (("a", "other"), ("b", "m")):
        await redis.hset(keys.adapter(name), mapping={"model": model, "version": 0})
        await redis.sadd(keys.adapters, name)
    assert await play.served_as(redis, keys, "m", 0.0) == "b"


async def test_an_unscored_held_out_answer_stops_the_demo(redis: Redis, keys: Keys) -> None:
    """Catches a comparison over the answers that happened to be scored."""
    async with TestServer(cell.Service(scores=False).app()) as server:
        target = Target(url=str(server.make_url("")), model="m", slo=SLO)
        with pytest.raises(CollmError, match="1 of 1 held-out"):
            await Play(redis, keys, Recorder(redis, keys), target, print).score([Prompt((("user", "q"),), "a")])


async def test_a_replica_without_a_digest_is_an_error(redis: Redis, keys: Keys) -> None:
    """Catches a base that could not be checked passing as unchanged."""
    await Registry(redis, keys).register(cell.info("r1", data_url="http://127.0.0.1:9"), 60)
    with pytest.raises(CollmError, match="no digest"):
        await play.fresh_digests(redis, keys)


async def test_a_running_job_is_waited_for(redis: Redis, keys: Keys) -> None:
    """Catches scoring in the middle of the last round, and waiting for a job that began later."""
    said = list[str]()
    await redis.sadd(keys.jobs, "j1")
    performance = Play(redis, keys, Recorder(redis, keys), Target(url="u", model="m", slo=SLO), said.append)
    waiting = asyncio.create_task(performance.settle())
    await eventually(lambda: said)
    assert not waiting.done()
    await redis.sadd(keys.jobs, "j2")
    await redis.srem(keys.jobs, "j1")
    await asyncio.wait_for(waiting, 10.0)


async def test_the_recorder_outlives_a_broker_restart(tmp_path: Path, keys: Keys) -> None:
    """Catches a recording that silently ends when the broker is away for a moment."""
    broker = Broker()
    broker.start()
    try:
        async with connection(broker.url) as redis:
            recorder = Recorder(redis, keys)
            task = asyncio.create_task(recorder.run())
            first, *others = cell.events()
            await append(redis, keys.events, kind(first), "e", encode(first))
            await eventually(lambda: recorder.events)
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
            for event in others:
                await append(redis, keys.events, kind(event), "e", encode(event))
            await eventually(lambda: recorder.events == cell.events())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        broker.close()
