"""Every message survives the wire; a wrong one is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from collm_common import messages as m
from collm_common.errors import MessageError
from collm_common.types import AdapterRef, BatchSizes, Quality, ReplicaState, SamplingParams, Slo

SLO = Slo("chat", ttft_s=0.5, tpot_s=0.05)
SIZES = BatchSizes(train=4, infer=8)
HYPER = m.Hyperparams()
REPLIES: tuple[m.Reply, ...] = (
    m.Delta("a", 0, 3, (1, 2), "hi", AdapterRef("x", "2.1"), "stop", (m.TokenLogprob(1, -0.5, ((1, -0.5),)),)),
    m.Done("a", 0, 5, 0.1, 0.2, 0.3, Quality(1.5, 7), m.Expected(0.1, 0.02, 1.1), "r1"),
    m.Failed("a", 1, 503, "rejected-ttl-expired", "too late"),
    m.Lost("a", 2),
)
EXAMPLES: list[m.AnyMessage] = [
    m.Request(
        id="a",
        ingress="i1",
        model="m",
        prompt=(1, 2),
        prefix=(3,),
        sampling=SamplingParams(stop=("x",)),
        slo=SLO,
        arrival_s=1.0,
        deadline_s=float("inf"),
    ),
    m.Freed(replica="r1", requests=2),
    m.Replies(items=REPLIES),
    m.Cancel(id="a"),
    m.Configure(sizes=SIZES),
    m.LoadAdapter(name="x", version=2),
    m.UnloadAdapter(name="x"),
    m.TrainRound(
        job="j",
        round=1,
        adapter="x",
        start=0,
        sizes=SIZES,
        steps=8,
        first_step=0,
        total_steps=16,
        hyper=HYPER,
        deadline_s=9.0,
    ),
    m.Aggregate(
        job="j", round=1, adapter="x", version=1, parent=0, clients=("r1",), steps=6, hyper=HYPER, deadline_s=9.0
    ),
    m.Evaluate(job="j", round=1, adapter="x", version=1, hyper=HYPER, deadline_s=9.0),
    m.PauseTraining(),
    m.ResumeTraining(),
    m.StopTraining(job="j"),
    m.Leave(reason="by hand"),
    m.InferenceReport(
        replica="r1",
        state=ReplicaState.IDLE,
        time_s=1.0,
        utilisation=0.5,
        memory_bytes=1,
        queue=0,
        running=1,
        mean_batch=0.5,
        limit=8,
        train_batch=0,
        iterations=(m.Iteration(SIZES, 3, 0.01),),
        versions={"x": "2.1"},
        served=(m.Served(SLO, 3, 0.5),),
        sm_shares=(0.3, 1.0),
        answered=(m.Answered("chat", 5, 0.3, 0.02, m.Expected(0.1, 0.02)), m.Answered("chat", 1, 0.3)),
    ),
    m.TrainReport(
        replica="r1",
        job="j",
        round=1,
        step=1,
        time_s=1.0,
        sizes=SIZES,
        step_s=0.1,
        samples=4,
        loss=2.0,
        noise_scale=3.0,
    ),
    m.StateChanged(replica="r1", before=ReplicaState.IDLE, after=ReplicaState.COMBINED, reason="job j", time_s=1.0),
    m.ReplicaChanged(replica="r1", what="down", reason="killed", time_s=1.0),
    m.JobChanged(job="j", status="training", round=1, reason="3 clients", time_s=1.0),
    m.AdapterPublished(name="x", version=2, before=2.0, after=1.0, time_s=1.0),
    m.UpdateUploaded(job="j", round=1, replica="r1", samples=32, loss=2.0, loss_last=1.0, time_s=1.0),
    m.AdapterRolledBack(name="x", version=1, before=2, reason="worse", time_s=1.0),
    m.Aggregated(job="j", round=1, adapter="x", version=1, residual=0.1, time_s=1.0),
    m.Evaluated(job="j", round=1, replica="r1", adapter="x", version=1, quality=Quality(1.0, 9), time_s=1.0),
    m.TaskFailed(job="j", round=1, replica="r1", task="train_round", reason="no data", time_s=1.0),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=m.kind)
def test_a_message_survives_the_wire(message: m.AnyMessage) -> None:
    """A field whose type does not decode, or two kinds with one tag."""
    assert m.decode(m.encode(message)) == message


def test_every_kind_has_an_example() -> None:
    """A kind added without a round-trip test."""
    kinds = {type_ for type_ in vars(m).values() if isinstance(type_, type) and issubclass(type_, m.Message)}
    assert kinds - {m.Message} == {type(example) for example in EXAMPLES}


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("schema", 2, "schema"),
        ("prompt", [], "prompt"),
        ("id", 7, "id"),
        ("arrival_s", "x", "arrival_s"),
        ("kind", "no", "kind"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, named: str) -> None:
    """An error that leaves the reader guessing which field of which message was wrong."""
    body = {**msgspec.msgpack.decode(m.encode(EXAMPLES[0])), field: value}
    with pytest.raises(MessageError, match=named):
        m.decode(msgspec.msgpack.encode(body))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", m.encode(EXAMPLES[0])[:-1]])
def test_garbage_is_a_message_error(data: bytes) -> None:
    """A consumer that dies of a foreign exception on a truncated entry."""
    with pytest.raises(MessageError):
        m.decode(data)
