"""Files and fine-tuning jobs over a launcher that runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from redis.asyncio import Redis

from collm_common import post
from collm_common.errors import InvalidRequest
from collm_common.keys import Keys
from collm_common.messages import JobChanged, TrainRound
from collm_common.registry import Registry
from collm_common.types import ReplicaState
from collm_dispatcher.ingress.listing import Page
from collm_dispatcher.ingress.tuning_store import EVENTS_READ, Tuning, TuningStore
from tests.ingress.support import Front, front
from tests.ingress.tuning import LINES, tuning_cell
from tests.launcher.support import LOSSES
from tests.support.waiting import eventually

FILES, JOBS = "/v1/files", "/v1/fine_tuning/jobs"


async def upload(site: Front, text: str, purpose: str = "fine-tune") -> tuple[int, dict[str, Any]]:
    form = aiohttp.FormData()
    form.add_field("purpose", purpose)
    form.add_field("file", text.encode(), filename="data.jsonl")
    async with site.http.post(FILES, data=form) as response:
        return response.status, await response.json()


def lines_at(data: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in data.glob("*/uploads/*.jsonl"):
        found.setdefault(path.parts[-3], set()).update(line for line in path.read_text().splitlines() if line)
    return found


async def test_a_file_is_dealt_out_and_a_job_trains_an_adapter(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Data that lies with one replica or with Redis, and a job that no launcher runs or whose end nobody is told."""
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, _):
        status, file = await upload(site, "\n".join(LINES) + "\n")
        assert (status, file["status"], file["collm"]["samples"]) == (200, "processed", len(LINES))
        dealt = lines_at(tmp_path)
        assert sorted(len(lines) for lines in dealt.values()) == [2, 2, 3]
        assert set().union(*dealt.values()) == set(LINES)
        assert (await site.get(f"{FILES}/{file['id']}"))[1] == file
        assert [each["id"] for each in (await site.get(FILES))[1]["data"]] == [file["id"]]
        asked = {"model": "m", "training_file": file["id"], "suffix": "desk", "metadata": {"a": "b"}}
        status, job = await site.post(JOBS, asked)
        assert (status, job["status"], job["metadata"]) == (200, "queued", {"a": "b"})
        again = await site.post(JOBS, asked)
        assert again[0] == 409
        await eventually(lambda: _status(site, job["id"], "succeeded"))
        _, ended = await site.get(f"{JOBS}/{job['id']}")
        assert ended["fine_tuned_model"] == "m-desk@v2"
        assert ended["finished_at"] >= job["created_at"]
        _, events = await site.get(f"{JOBS}/{job['id']}/events?limit=3")
        assert (len(events["data"]), events["has_more"]) == (3, True)
        _, older = await site.get(f"{JOBS}/{job['id']}/events?limit=100&after={events['last_id']}")
        losses = [each["data"]["loss"] for each in older["data"] if each["type"] == "metrics"]
        assert losses
        assert [each["id"] for each in (await site.get(JOBS))[1]["data"]] == [job["id"]]
        checkpoints = f"{JOBS}/{job['id']}/checkpoints"
        _, made = await site.get(checkpoints)
        assert [each["fine_tuned_model_checkpoint"] for each in made["data"]] == ["m-desk@v2", "m-desk@v1"]
        assert [each["metrics"]["full_valid_loss"] for each in made["data"]] == [LOSSES[2], LOSSES[1]]
        _, second = await site.get(f"{checkpoints}?limit=1&after={made['data'][0]['id']}")
        assert (second["data"], second["has_more"]) == (made["data"][1:], False)
    assert not [key async for key in redis.scan_iter("*") if b"question" in await redis.dump(key)]


async def _status(site: Front, id_: str, wanted: str) -> bool:
    return bool((await site.get(f"{JOBS}/{id_}"))[1]["status"] == wanted)


async def test_jobs_are_cancelled_while_they_wait_and_while_they_run(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A job that its client has given up and that trains nevertheless."""
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, members):
        for member in members:
            member.going.clear()
        _, file = await upload(site, "\n".join(LINES))
        _, runs = await site.post(JOBS, {"model": "m", "training_file": file["id"], "suffix": "runs"})
        await eventually(lambda: any(member.told(TrainRound) for member in members))
        _, waits = await site.post(JOBS, {"model": "m", "training_file": file["id"]})
        for job in (waits, runs):
            assert (await site.post(f"{JOBS}/{job['id']}/cancel", {}))[1]["status"] == "cancelled"
        await eventually(lambda: _ended(redis, keys))
        assert (await site.get(f"{JOBS}/{runs['id']}"))[1]["status"] == "cancelled"


async def test_a_job_that_starts_while_it_is_cancelled_ends(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A job that trains on because it was still seen as waiting when its client gave it up."""
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, members):
        for member in members:
            member.going.clear()
        _, file = await upload(site, "\n".join(LINES))
        _, job = await site.post(JOBS, {"model": "m", "training_file": file["id"], "suffix": "runs"})
        store = TuningStore(redis, keys)
        await eventually(lambda: any(member.told(TrainRound) for member in members))
        stale = msgspec.structs.replace(await store.find(job["id"]), status="queued")
        await store.cancel(stale)
        await eventually(lambda: _ended(redis, keys))


async def test_a_paused_job_rests_and_goes_on_where_it_was(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Replicas that train on for a paused job, a round that is lost with the pause, or a job that never wakes up."""
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, members):
        for member in members:
            member.going.clear()
        _, file = await upload(site, "\n".join(LINES))
        _, job = await site.post(JOBS, {"model": "m", "training_file": file["id"], "suffix": "runs"})
        await eventually(lambda: any(member.told(TrainRound) for member in members))
        assert (await site.post(f"{JOBS}/{job['id']}/pause", {}))[1]["status"] == "paused"

        async def serve() -> bool:
            infos = (await Registry(redis, keys).replicas()).values()
            return all(not info.job and info.state is not ReplicaState.COMBINED for info in infos)

        await eventually(serve)
        _, waits = await site.post(JOBS, {"model": "m", "training_file": file["id"]})
        assert (await site.post(f"{JOBS}/{waits['id']}/pause", {}))[1]["status"] == "paused"
        for member in members:
            member.going.set()
        assert (await site.post(f"{JOBS}/{job['id']}/resume", {}))[1]["status"] in ("queued", "running")
        await eventually(lambda: _status(site, job["id"], "succeeded"))
        assert (await site.get(f"{JOBS}/{job['id']}"))[1]["fine_tuned_model"] == "m-runs@v2"
        assert (await site.get(f"{JOBS}/{waits['id']}"))[1]["status"] == "paused"
        assert (await site.post(f"{JOBS}/{waits['id']}/cancel", {}))[1]["status"] == "cancelled"
        assert (await site.post(f"{JOBS}/{job['id']}/pause", {}))[1]["error"]["code"] == "job_ended"
        assert await redis.smembers(keys.paused) == set()


async def test_every_event_of_a_job_is_told_once_whatever_the_page(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """Events behind thousands of other jobs' that are never shown, or a page that begins anew for ever."""
    known = Tuning(id="j", asked="m", model="m", adapter="a", training_file="f", created_at=0)
    store, registry = TuningStore(redis, keys), Registry(redis, keys)
    async with redis.pipeline(transaction=False) as pipe:
        for number in range(EVENTS_READ + 10):
            mine = number % 1000 == 0
            event = JobChanged(job="j" if mine else "other", status="training", round=1, reason=str(number), time_s=0)
            post.queue_event(pipe, keys, event, event.job)
        await pipe.execute()
    await registry.announce(JobChanged(job="j", status="done", round=1, reason="last", time_s=0), "j")
    for oldest in (False, True):
        reasons, after, more = list[str](), "", True
        while more:
            told, more = await store.events(known, Page(2, after, oldest))
            after, reasons = told[-1][0], reasons + [event.reason for _, event in told if isinstance(event, JobChanged)]
        assert reasons == (["0", "1000", "2000", "last"] if oldest else ["last", "2000", "1000", "0"])
    with pytest.raises(InvalidRequest):
        await store.events(known, Page(2, "none"))


async def test_a_file_is_read_back_and_deleted_everywhere(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Lines that come back in another order, or that go on being learnt from though their file was deleted."""
    text = "\n".join([LINES[0], "", *LINES[1:]]) + "\n"
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, _):
        _, file = await upload(site, text)
        _, lone = await upload(site, LINES[0])
        assert (await upload(site, text))[1]["id"] == file["id"]
        for each, wanted in ((file, text), (lone, LINES[0])):
            async with site.http.get(f"{FILES}/{each['id']}/content") as response:
                assert (response.status, await response.text()) == (200, wanted)
        by_age = [[each["id"] for each in (await site.get(f"{FILES}?order={o}"))[1]["data"]] for o in ("asc", "desc")]
        assert by_age[0] == by_age[1][::-1]
        assert (await site.get(f"{FILES}?purpose=batch"))[1]["data"] == []
        assert (await site.get(f"{FILES}?order=none"))[1]["error"]["param"] == "order"
        async with site.http.delete(f"{FILES}/{file['id']}") as response:
            assert await response.json() == {"id": file["id"], "object": "file", "deleted": True}
        assert set().union(*lines_at(tmp_path).values()) == {LINES[0]}
        assert (await site.get(f"{FILES}/{file['id']}/content"))[0] == 404
        assert [each["id"] for each in (await site.get(FILES))[1]["data"]] == [lone["id"]]
        await redis.delete(keys.lease("r1"))
        await eventually(lambda: _away(site, lone["id"]))
        async with site.http.delete(f"{FILES}/{lone['id']}") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_replica")


async def _away(site: Front, id_: str) -> bool:
    return (await site.get(f"{FILES}/{id_}/content"))[0] == 503


async def test_jobs_are_found_by_their_metadata(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A filter that is taken and ignored, or that hides what comes behind the first page."""
    await redis.hset(keys.file("file-here"), mapping={"model": "m"})
    async with front(redis, keys, tokenizer_folder) as site:
        for number in range(5):
            asked = {"model": "m", "training_file": "file-here", "metadata": {"n": str(number % 2)}}
            assert (await site.post(JOBS, asked))[0] == 200
        _, found = await site.get(f"{JOBS}?metadata[n]=1&limit=1")
        assert ([each["metadata"] for each in found["data"]], found["has_more"]) == ([{"n": "1"}], True)
        _, rest = await site.get(f"{JOBS}?metadata[n]=1&after={found['last_id']}")
        assert ([each["metadata"] for each in rest["data"]], rest["has_more"]) == ([{"n": "1"}], False)


async def _ended(redis: Redis, keys: Keys) -> bool:
    return not await redis.smembers(keys.jobs) and not await redis.hgetall(keys.wanted("m"))


async def test_bad_files_name_the_line_and_leave_nothing(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Half a file at some replicas, and an error that names a line of a share nobody knows."""
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, _):
        status, body = await upload(site, "\n".join([*LINES[:4], '{"prompt": 3}', *LINES[4:]]))
        assert (status, body["error"]["param"]) == (400, "file")
        assert "line 5" in body["error"]["message"]
        assert lines_at(tmp_path) == {}
        assert (await upload(site, "\n\n"))[1]["error"]["param"] == "file"
        assert (await upload(site, LINES[0], "assistants"))[1]["error"]["param"] == "purpose"
        async with site.http.post(FILES, data=b"no form") as response:
            assert response.status == 400
        assert (await site.get(FILES))[1]["data"] == []


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "none"}, 404, "model"),
        ({"training_file": "file-none"}, 404, "training_file"),
        ({"suffix": "no spaces"}, 400, "suffix"),
        ({"validation_file": "file-1"}, 400, "validation_file"),
        ({"hyperparameters": {"n_epochs": 3}}, 400, "hyperparameters.n_epochs"),
        ({"method": {"type": "dpo"}}, 400, "method.type"),
        ({"metadata": {"a": 1}}, 400, "metadata[...]"),
    ],
)
async def test_jobs_that_cannot_be_run_as_asked_are_refused(
    redis: Redis, keys: Keys, tokenizer_folder: Path, fields: dict[str, Any], status: int, param: str
) -> None:
    """A hyperparameter that is taken and ignored."""
    await redis.hset(keys.file("file-here"), mapping={"model": "m"})
    async with front(redis, keys, tokenizer_folder) as site:
        found, body = await site.post(JOBS, {"model": "m", "training_file": "file-here", **fields})
        assert (found, body["error"]["param"]) == (status, param)
        for path in (f"{JOBS}/none", f"{JOBS}/none/events", f"{FILES}/none"):
            assert (await site.get(path))[0] == 404
        for query in ("limit=0", "limit=x", "after=none"):
            assert (await site.get(f"{JOBS}?{query}"))[0] == 400
    assert json.dumps(body)


@pytest.mark.parametrize(
    ("name", "headers", "status"),
    [(b"\xff.jsonl", b"", 200), (b"x", b"NoColon\r\n", 400), (b"x", b"X: " + b"y" * 20_000 + b"\r\n", 400)],
)
async def test_headers_of_a_part_are_read_or_refused(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path, name: bytes, headers: bytes, status: int
) -> None:
    """Lines that are stored with the replicas while the client is told of an internal error."""
    purpose = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    about = b'--B\r\nContent-Disposition: form-data; name="file"; filename="' + name + b'"\r\n' + headers
    body = purpose + about + b"\r\n" + "\n".join(LINES).encode() + b"\r\n--B--\r\n"
    async with tuning_cell(redis, keys, tokenizer_folder, tmp_path) as (site, _):
        kind = {"Content-Type": "multipart/form-data; boundary=B"}
        async with site.http.post(FILES, data=body, headers=kind) as response:
            assert response.status == status, await response.text()
    assert bool(lines_at(tmp_path)) == (status == 200)
