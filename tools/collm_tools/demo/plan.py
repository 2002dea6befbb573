"""What the demo plays and with which settings. Everything here is a value; nothing runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collm_common.types import Slo
from collm_tools.demo.corpus import Corpus, build, deal
from collm_tools.load import traces, traffic
from collm_tools.load.prompts import read_prompts
from collm_tools.load.runner import Offer, plan

REPLICAS = 3
MAX_TOKENS = 32
HELDOUT_MAX_TOKENS = 1
SLO = Slo(name="default", ttft_s=6.0, e2e_s=20.0)
PHASES = ((1.0, 60.0), (0.05, 160.0), (1.0, 60.0))
JOB_PATIENCE_S = 120.0
ADAPTER_PATIENCE_S = 10.0
HELDOUT_GAP_S = 0.4

ADAPTER = "help-desk"
ROUNDS, STEPS, SNAPSHOT_STEPS, TRAIN_BATCH = 2, 8, 3, 4

# Two cores: one thread a process, short sequences, small rounds, windows of seconds where an operator has minutes.
SERVICE_SETTINGS = {
    "COLLM_DISPATCHER_SLO_CLASSES": json.dumps({SLO.name: {"ttft_s": SLO.ttft_s, "e2e_s": SLO.e2e_s}}),
    "COLLM_REPLICA_DEVICE": "cpu",
    "COLLM_REPLICA_DTYPE": "float32",
    "COLLM_REPLICA_CONTEXT_TOKENS": "512",
    "COLLM_REPLICA_KV_MB": "128",
    "COLLM_LAUNCHER_IDLE": json.dumps({"window": 8, "return_ticks": 20}),
    "COLLM_LAUNCHER_COOLDOWN_S": "600",
    "COLLM_LAUNCHER_RULES": json.dumps(
        {
            "rounds": ROUNDS,
            "steps": STEPS,
            "strategy": "product",
            "hyper": {
                "rank": 8,
                "alpha": 16.0,
                "max_tokens": 256,
                "snapshot_steps": SNAPSHOT_STEPS,
                "heldout_samples": 8,
            },
        }
    ),
    "COLLM_COORDINATOR_SLO": json.dumps({"name": SLO.name, "ttft_s": SLO.ttft_s, "e2e_s": SLO.e2e_s}),
    "COLLM_COORDINATOR_MAX_TRAIN_BATCH": str(TRAIN_BATCH),
}


def service_settings(served_name: str) -> dict[str, str]:
    """By variable name, with the adapter that is trained for the served model."""
    return SERVICE_SETTINGS | {"COLLM_LAUNCHER_ADAPTERS": json.dumps({served_name: ADAPTER})}


@dataclass(frozen=True)
class DemoOptions:
    """`trace` and `prompts` replace the built-in traffic and texts; `duration_scale` stretches the script."""

    model: str
    out_dir: Path
    cache_dir: Path
    port: int = 0
    redis_server: str = ""
    trace: Path | None = None
    prompts: Path | None = None
    duration_scale: float = 1.0
    trace_scale: float = 1.0
    seed: int = 0

    @property
    def duration_s(self) -> float:
        """How long traffic is offered."""
        return self.duration_scale * sum(seconds for _, seconds in PHASES)

    @property
    def heldout_gap_s(self) -> float:
        """Between two held-out questions."""
        return HELDOUT_GAP_S * min(1.0, self.duration_scale)


def corpus(options: DemoOptions) -> Corpus:
    """The built-in help desk, or a file's prompts dealt to the replicas."""
    if options.prompts is None:
        return build(options.seed)
    return deal(read_prompts(options.prompts), REPLICAS, options.seed)


def offers(options: DemoOptions, texts: Corpus) -> list[Offer]:
    """Burst, lull, burst; or the trace, cut to the same time."""
    if options.trace is None:
        script = [(rate, seconds * options.duration_scale) for rate, seconds in PHASES]
        arrivals: Sequence[traffic.Arrival] = traffic.phases(script, options.seed)
    else:
        played = traffic.scale(traces.read_trace(options.trace), options.trace_scale)
        arrivals = traffic.cut(played, options.duration_s)
    return plan(arrivals, texts.traffic, MAX_TOKENS, options.seed)
