"""The nouns of CoLLM. Everything here is plain data; times are Unix seconds unless a name says otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Share = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Rank = Annotated[int, Meta(ge=1, le=1024)]
Strategy = Literal["fedavg", "fedprox", "fedavgm", "fedadam", "product"]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$(?!\n)")]


class ReplicaState(StrEnum):
    """Serving takes requests; Idle only finishes what it has; Combined serves and trains at once."""

    SERVING = "serving"
    IDLE = "idle"
    COMBINED = "combined"


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """A latency objective: any mix of limits, all of which must hold. `late` says what to do past the deadline."""

    name: Name
    ttft_s: Positive | None = None
    tpot_s: Positive | None = None
    e2e_s: Positive | None = None
    late: Literal["serve", "reject"] = "serve"

    def deadline(self, arrival_s: float, max_tokens: int) -> float:
        """When the last token is due; infinite if the objective bounds neither the end nor the pace."""
        ends = [arrival_s + self.e2e_s] if self.e2e_s is not None else []
        if self.tpot_s is not None and self.ttft_s is not None:
            ends.append(arrival_s + self.ttft_s + self.tpot_s * max(0, max_tokens - 1))
        elif self.ttft_s is not None and self.e2e_s is None:
            ends.append(arrival_s + self.ttft_s)
        return min(ends, default=float("inf"))

    def first_due(self, arrival_s: float) -> float:
        """When the first token is due; infinite if the objective does not bound it."""
        return float("inf") if self.ttft_s is None else arrival_s + self.ttft_s

    def met(self, ttft_s: float, e2e_s: float, tokens: int) -> bool:
        """Whether one response kept every limit. TPOT is (e2e - ttft) / (tokens - 1), 0 for one token."""
        tpot_s = (e2e_s - ttft_s) / (tokens - 1) if tokens > 1 else 0.0
        pairs = ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s), (e2e_s, self.e2e_s))
        return all(limit is None or value <= limit for value, limit in pairs)


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True):
    """How to choose tokens. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; logprobs None is off.

    Penalties are subtracted from the logits of tokens that the answer has already, as OpenAI defines them: `presence`
    once, `frequency` as often as the token occurs. `logit_bias` pairs (token, what is added). An answer has at least
    `min_tokens` tokens; a token of `stop_tokens` ends it and is not shown. `json_schema` is the text of the schema that
    the answer follows, "" for none. `prompt_logprobs` asks for log-probabilities of the prompt's tokens, too.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 16
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Count = 0
    min_p: Fraction = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[tuple[tuple[Count, Bias], ...], Meta(max_length=1024)] = ()
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    stop: Annotated[tuple[str, ...], Meta(max_length=16)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    stop_tokens: Annotated[tuple[Count, ...], Meta(max_length=128)] = ()
    json_schema: Annotated[str, Meta(max_length=65_536)] = ""
    prompt_logprobs: bool = False


class Quality(Struct, frozen=True):
    """Token-level cross-entropy (nats) of a reference answer; response quality is 1 / cross_entropy."""

    cross_entropy: float
    tokens: Count

    @classmethod
    def pooled(cls, parts: Iterable[Quality]) -> Quality | None:
        """The mean over the tokens of all parts; None if they have none."""
        counted = [part for part in parts if part.tokens]
        tokens = sum(part.tokens for part in counted)
        return cls(sum(part.cross_entropy * part.tokens for part in counted) / tokens, tokens) if tokens else None


class BatchSizes(Struct, frozen=True):
    """B samples a training micro-step, at most b sequences in the running batch, and the trainer's share of the SMs.

    `sm_share` is 1 where nothing limits the trainer, and where nothing is trained.
    """

    train: Count = 0
    infer: Annotated[int, Meta(ge=1)] = 1
    sm_share: Share = 1.0


class AdapterRef(Struct, frozen=True):
    """One version of one adapter, written `name@v3`; a replica's own snapshot inside a round is `name@v3.2`."""

    name: Name
    version: Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)?$")]

    def __str__(self) -> str:
        return f"{self.name}@v{self.version}"

    @classmethod
    def parse(cls, text: str) -> AdapterRef:
        """Raises ValueError unless `text` is `name@vN` or `name@vN.M`."""
        name, at, version = text.rpartition("@v")
        if not at or not name or not all(part.isdigit() for part in version.split(".", 1)):
            raise ValueError(f"adapter {text!r} is not of the form name@v3")
        return cls(name, version)


class AdapterManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stored adapter version is: enough to refuse it before any tensor is touched.

    `modules` are the leaf names of the adapted linear layers; `base_digest` names the weights it was trained on;
    `sha256` is of the safetensors bytes.
    """

    name: Name
    version: Annotated[int, Meta(ge=1)]
    base_digest: str
    rank: Rank
    alpha: Positive
    modules: tuple[str, ...]
    sha256: str
    size_bytes: Count
    parent: int = 0
    job: str = ""


class ReplicaInfo(Struct, frozen=True):
    """A registry entry. `incarnation` changes with every start of its inference process; `ready` is set by a real step.

    `infer_batch_max` is the engine's hard limit on running sequences; `data_url` is its internal data endpoint;
    `quality` is the launcher's score Q for this replica and model; `job` is "" when it trains nothing; `trainable`
    says that it can, and has data of its own, at ranks up to `train_rank`.
    """

    id: Name
    model: Name
    incarnation: str
    state: ReplicaState
    ready: bool
    infer_batch_max: Annotated[int, Meta(ge=1)]
    context_tokens: Annotated[int, Meta(ge=1)]
    base_digest: str = ""
    data_url: str = ""
    quality: float = 1.0
    job: str = ""
    trainable: bool = True
    train_rank: Rank = 1024
    alive: bool = True
