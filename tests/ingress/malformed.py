"""Requests that are wrong in every way that a client can be, from a seed, and what each must be answered with."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from collm_dispatcher.ingress.adapter_routes import LoadBody, UnloadBody
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.feedback import FeedbackBody
from collm_dispatcher.ingress.tuning_routes import TuningBody
from collm_dispatcher.ingress.unsupported import NOT_IN_CHATS
from tests.ingress.support import Front, chat, text

AT_ONCE, WITHIN_S = 24, 60
JSON = "application/json"
GOOD: list[tuple[str, type[Struct], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatBody, chat()),
    ("/v1/completions", CompletionBody, text()),
    ("/v1/fine_tuning/jobs", TuningBody, {"model": "m", "training_file": "file-1"}),
    ("/v1/feedback", FeedbackBody, {"id": "cmpl-1", "rating": "good"}),
    ("/v1/load_lora_adapter", LoadBody, {"lora_name": "a", "lora_path": "a"}),
    ("/v1/unload_lora_adapter", UnloadBody, {"lora_name": "a"}),
]
OFTEN = (8, 8, 1, 1, 1, 1)
ODD: list[Any] = [None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 2**31, 2**63, -(2**63), 1e308, 10**30, "", "a", "\0"]
ODD += ["\ud800", "é" * 300, "x" * 5000, "stop", [], {}, [[]], {"type": "text"}, {"type": "json_object"}, {"$ref": "#"}]
NUMBERS = (b"1e400", b"-1e999", b"9" * 5000, b"NaN", b"Infinity", b"-Infinity", b"0x10", b"1.", b"01", b"1e-9999")
TYPES = (
    "text/plain",
    "application/xml",
    "application/json; charset=utf-16",
    "application/json; charset=none",
    "multipart/form-data",
    "multipart/form-data; boundary=",
    "application/x-www-form-urlencoded",
    ";;;",
    "a" * 4000,
)


class Malformed(Struct, frozen=True):
    """A POST."""

    path: str
    data: bytes
    headers: dict[str, str]


def values(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, odd ones more often than usual."""
    kind = chance.randrange(8)
    if kind == 0 and depth < 3:
        return [values(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 1 and depth < 3:
        return {str(chance.choice(ODD)): values(chance, depth + 1) for _ in range(chance.randrange(4))}
    return copy.deepcopy(chance.choice(ODD))


def malformed(chance: random.Random) -> Malformed:
    """A good request of which fields were replaced, and at times its bytes or its headers damaged; or a bad form."""
    if chance.randrange(12) == 0:
        return _form(chance)
    (path, kind, good) = chance.choices(GOOD, OFTEN)[0]
    body = dict(good)
    fields = [*(field.name for field in msgspec.structs.fields(kind)), *NOT_IN_CHATS, "unknown"]
    for name in chance.sample(fields, chance.randrange(1, 4)):
        body[name] = values(chance)
    damage = chance.choice((_whole, _whole, _whole, _cut, _deep, _number, _bytes, _keys))
    headers = {"Content-Type": JSON if chance.randrange(8) else chance.choice(TYPES)}
    if chance.randrange(40) == 0:
        headers["Content-Encoding"] = chance.choice(("gzip", "deflate", "br", "none"))
    return Malformed(path, damage(chance, json.dumps(body).encode()), headers)


def _whole(_: random.Random, data: bytes) -> bytes:
    return data


def _cut(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return chance.choice((data[:at], data[at:], data + data, b""))


def _deep(chance: random.Random, data: bytes) -> bytes:
    levels = chance.choice((10, 500, 5000, 100_000))
    opening, closing = chance.choice(((b"[", b"]"), (b'{"a":', b"}")))
    inner = opening * levels + b"1" + closing * chance.choice((levels, 0))
    return chance.choice((inner, data[:-1] + b',"unknown":' + inner + b"}", data[:-1] + b',"stop":' + inner + b"}"))


def _number(chance: random.Random, data: bytes) -> bytes:
    name = chance.choice((b"max_tokens", b"temperature", b"seed", b"n", b"top_p", b"unknown"))
    return data[:-1] + b',"' + name + b'":' + chance.choice(NUMBERS) + b"}"


def _bytes(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\xef\xbb\xbf", b"\\u12")) + data[at:]


def _keys(chance: random.Random, data: bytes) -> bytes:
    many = b",".join(b'"k%d":0' % number for number in range(5000))
    return data[:-1] + b"," + chance.choice((many, b'"model":"m","model":1', b'"' + b"k" * 60_000 + b'":1')) + b"}"


def _form(chance: random.Random) -> Malformed:
    purpose = b'Content-Disposition: form-data; name="purpose"\r\n\r\n' + chance.choice((b"fine-tune", b"x", b"\xff"))
    line = chance.choice((b'{"prompt":"a","completion":"b"}', b"{", b"\xff\xfe", b"", b"[" * 50_000, b"\n" * 3000))
    file = b'Content-Disposition: form-data; name="file"; filename="' + chance.choice((b"a", b"\xff", b"")) + b'"\r\n'
    file += chance.choice((b"", b"Content-Transfer-Encoding: base64\r\n", b"NoColon\r\n")) + b"\r\n" + line
    parts = chance.sample([purpose, file, b"\r\n\r\n", b""], chance.randrange(1, 5))
    data = b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + b"--B--\r\n"
    damage: Callable[[random.Random, bytes], bytes] = chance.choice((_whole, _whole, _cut, _bytes))
    kind = chance.choice(("multipart/form-data; boundary=B", "multipart/mixed; boundary=B", *TYPES))
    return Malformed(chance.choice(("/v1/files", "/v1/replicas/r1/data")), damage(chance, data), {"Content-Type": kind})


async def check(site: Front, asked: Malformed) -> int:
    """Status of one answer, which must be whole: an OpenAI error object, a JSON body, or a stream with its end."""
    async with site.http.post(asked.path, data=asked.data, headers=asked.headers) as response:
        body = await response.text()
    context = (response.status, asked.path, asked.headers, asked.data[:500], body[:500])
    assert response.status < 500 or response.status == 503, context
    if response.status == 400 and "Content-Encoding" in asked.headers and response.content_type == "text/plain":
        return 400  # the HTTP parser's own refusal
    assert response.content_type in (JSON, "text/event-stream"), context
    if response.status != 200:
        error = json.loads(body)["error"]
        assert error["message"], context
        assert error.keys() == {"message", "type", "param", "code"}, context
    elif response.content_type == "text/event-stream":
        assert body.endswith("data: [DONE]\n\n"), context
    else:
        assert json.loads(body)["object"], context
    return response.status


async def send_malformed(site: Front, seed: int, count: int) -> Counter[int]:
    """How often each status was answered. Fails with the first answer that is none, or that does not come."""
    chance, statuses, places = random.Random(seed), Counter[int](), asyncio.Semaphore(AT_ONCE)

    async def one(asked: Malformed) -> None:
        async with places, asyncio.timeout(WITHIN_S):
            statuses[await check(site, asked)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one(malformed(chance)))
    return statuses
