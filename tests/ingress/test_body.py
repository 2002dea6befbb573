"""Bodies good and bad: what load generators and SDKs send is read, and every refusal names its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict

from collm_common.errors import InvalidRequest, SettingsError
from collm_common.types import Slo
from collm_dispatcher.ingress import objectives
from collm_dispatcher.ingress.body import ChatBody, CompletionBody, SloLimits, parse

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def read_chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps(CHAT | fields).encode())


def read_text(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps(TEXT | fields).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
        ({"slo": {"speed": 1}}, "slo"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": "json"}, "response_format"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    """A field that is silently ignored although it changes the answer, or an error nobody can act on."""
    with pytest.raises(InvalidRequest) as refused:
        read_chat(**fields)
    assert refused.value.param == param
    assert param.split(".")[-1].split("[")[0] in refused.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"null", b'{"model": "m"}', b"[" * 100_000])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    """A broken body that ends in an internal error."""
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatBody, data)
    assert refused.value.param in ("body", "messages")


def test_what_sdks_and_benchmarks_send_is_accepted() -> None:
    """Neutral values of unsupported fields, nulls and unknown fields: an SDK that sends defaults could do nothing."""
    body = read_chat(
        n=1,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        user="u",
        stop=None,
        temperature=None,
        stream_options=None,
        max_completion_tokens=7,
        ignore_eos=True,
        anything={"at": "all"},
    )
    params = body.sampling(7, body.logprob_count)
    assert (body.limit, params.temperature, params.top_p, params.top_k, params.stop) == (7, 1.0, 1.0, 0, ())
    assert params.ignore_eos
    assert params.logprobs is None


def test_sampling_fields_arrive() -> None:
    """A parameter that is read and forgotten."""
    body = read_chat(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=-1,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=2,
        max_tokens=3,
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "8": 1.5},
        stop_token_ids=[9],
    )
    params = body.sampling(3, body.logprob_count)
    assert (params.temperature, params.top_p, params.top_k, params.logprobs) == (0.0, 0.5, 3, 2)
    assert params.stop == ("a", "b")
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 0.5, -0.5)
    assert (params.logit_bias, params.min_tokens, params.stop_tokens) == (((7, -100.0), (8, 1.5)), 2, (9,))
    assert params.seed == 2**63 - 1
    assert read_chat(stop="a").sampling(1, None).stop == ("a",)
    assert read_chat(top_k=-1).sampling(1, None).top_k == 0


def test_a_response_format_is_a_schema() -> None:
    """A schema that is read and forgotten, or one for free text."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert json.loads(read_chat(response_format=named).sampling(6, None).json_schema) == schema
    assert read_chat(response_format={"type": "json_object"}).sampling(6, None).json_schema == '{"type":"object"}'
    assert read_text(response_format={"type": "text"}).sampling(6, None).json_schema == ""


def test_without_a_seed_two_requests_differ() -> None:
    """Every answer the same at temperature 1."""
    assert read_chat().sampling(1, None).seed != read_chat().sampling(1, None).seed


def test_top_logprobs_need_logprobs() -> None:
    """A field without effect."""
    with pytest.raises(InvalidRequest) as refused:
        _ = read_chat(top_logprobs=2).logprob_count
    assert refused.value.param == "top_logprobs"
    assert read_chat(logprobs=True).logprob_count == 0
    assert read_text(logprobs=3).logprob_count == 3


def test_content_may_be_text_parts_or_nothing() -> None:
    """Clients that always send lists of parts."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = read_chat(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert body.conversation() == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"one": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 10: 1}}, "logit_bias"),
        ({"min_tokens": 7}, "min_tokens"),
        ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 70_000}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_fields_that_contradict_are_named(fields: dict[str, Any], param: str) -> None:
    """A bias that is dropped silently, and an answer that can never be long enough."""
    with pytest.raises(InvalidRequest) as refused:
        read_chat(**fields).sampling(6, None)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], None),
        ([1, "a"], None),
        ([[], "a"], None),
        (["a", ""], None),
    ],
)
def test_prompts_are_texts_or_tokens_or_lists_of_them(prompt: Any, prompts: Any) -> None:
    """The second of two prompts is dropped silently; a token taken for a prompt."""
    body = read_text(prompt=prompt)
    if prompts is not None:
        assert body.prompts() == prompts
        return
    with pytest.raises(InvalidRequest) as refused:
        body.prompts()
    assert refused.value.param == "prompt"


def test_an_echo_has_log_probabilities_and_may_stand_alone() -> None:
    """An evaluation harness that cannot score a text, or an answer of no tokens where none was meant."""
    asked = read_text(echo=True, logprobs=1, max_tokens=0)
    assert asked.limit == 0
    assert asked.sampling(1, asked.logprob_count).prompt_logprobs
    assert not read_text(logprobs=1).sampling(1, 1).prompt_logprobs
    with pytest.raises(InvalidRequest) as refused:
        _ = read_text(max_tokens=0).limit
    assert refused.value.param == "max_tokens"
    assert read_text(echo=True).echoes


KNOWN = objectives.classes({"chat": {"ttft_s": 0.5, "late": "reject"}})


@pytest.mark.parametrize(
    ("headers", "field", "name"),
    [
        ({}, None, "default"),
        ({}, "chat", "chat"),
        ({}, SloLimits(), "default"),
        ({"x-slo-class": "chat"}, "default", "chat"),
        ({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "50", "x-slo-e2e-ms": "5000"}, None, "ttft500-tpot50-e2e5000"),
        ({"x-slo-e2e-ms": "99.6"}, "chat", "e2e100"),
        ({"x-llm-d-slo-ttft-ms": "500", "x-llm-d-slo-tpot-ms": "50"}, None, "ttft500-tpot50"),
        ({"x-llm-d-slo-e2e-ms": "700", "x-slo-ttft-ms": "90"}, None, "ttft90-e2e700"),
        ({"x-llm-d-inference-objective": "chat"}, None, "chat"),
        ({}, SloLimits(tpot_ms=20), "tpot20"),
    ],
)
def test_headers_go_before_the_body_and_the_default_is_last(headers: Any, field: Any, name: str) -> None:
    """A request in the wrong class."""
    assert objectives.choose(KNOWN, headers, field).name == name


def test_own_limits_are_in_seconds() -> None:
    """Milliseconds taken for seconds."""
    slo = objectives.choose(KNOWN, {"x-slo-ttft-ms": "500", "x-slo-e2e-ms": "5000"}, None)
    assert slo == Slo("ttft500-e2e5000", ttft_s=0.5, e2e_s=5.0)


@pytest.mark.parametrize(
    ("headers", "field", "param"),
    [
        ({"x-slo-class": "nope"}, None, "x-slo-class"),
        ({"x-slo-ttft-ms": "soon"}, None, "x-slo-ttft-ms"),
        ({"x-slo-e2e-ms": "-1"}, None, "x-slo-e2e-ms"),
        ({"x-slo-e2e-ms": "nan"}, None, "x-slo-e2e-ms"),
        ({"x-slo-e2e-ms": "1_0"}, None, "x-slo-e2e-ms"),
        ({"x-slo-e2e-ms": "\N{ARABIC-INDIC DIGIT FIVE}"}, None, "x-slo-e2e-ms"),
        ({"x-slo-e2e-ms": ""}, None, "x-slo-e2e-ms"),
        ({"x-slo-e2e-ms": "5", "x-llm-d-slo-e2e-ms": "6"}, None, "x-llm-d-slo-e2e-ms"),
        (CIMultiDict([("x-slo-ttft-ms", "5"), ("X-SLO-TTFT-MS", "6")]), None, "x-slo-ttft-ms"),
        (CIMultiDict([("x-slo-class", "chat"), ("x-slo-class", "default")]), None, "x-slo-class"),
        ({"x-llm-d-slo-e2e-ms": "inf"}, None, "x-llm-d-slo-e2e-ms"),
        ({"x-llm-d-inference-objective": "nope"}, None, "x-llm-d-inference-objective"),
        ({}, "nope", "slo"),
    ],
)
def test_a_wrong_objective_names_where_it_stands(headers: Any, field: Any, param: str) -> None:
    """A typo that silently becomes the default class."""
    with pytest.raises(InvalidRequest) as refused:
        objectives.choose(KNOWN, headers, field)
    assert refused.value.param == param


def test_wrong_classes_stop_the_start() -> None:
    """A class without the limit that was meant."""
    with pytest.raises(SettingsError, match=r"SLO_CLASSES.*chat"):
        objectives.classes({"chat": {"ttft_s": -1}})


def test_a_header_may_be_repeated_but_not_contradicted() -> None:
    """A client that gets one of two objectives, or is somebody else, depending on which proxy it came through."""
    assert objectives.choose(KNOWN, CIMultiDict([("x-slo-class", "chat")] * 2), None).name == "chat"
    with pytest.raises(InvalidRequest, match="contradicts"):
        objectives.tenant(CIMultiDict([(objectives.TENANT, "a"), (objectives.TENANT, "b")]))


def test_a_tenant_is_whoever_the_header_names() -> None:
    """Everybody in one flow, or a name of a megabyte in every message."""
    assert objectives.tenant({}) == ""
    assert objectives.tenant({"x-llm-d-inference-fairness-id": "acme"}) == "acme"
    with pytest.raises(InvalidRequest, match="129 characters"):
        objectives.tenant({"x-llm-d-inference-fairness-id": "x" * 129})


@pytest.mark.parametrize("name", ["\udcff", "a\nb"])
def test_a_tenant_that_no_message_can_carry_is_refused(name: str) -> None:
    """Catches bytes that are no text and end in an internal error when the request is appended."""
    with pytest.raises(InvalidRequest, match="x-llm-d-inference-fairness-id"):
        objectives.tenant({objectives.TENANT: name})
