"""Settings of the dispatcher (COLLM_DISPATCHER_*): ingress, dispatch loop, or both in one process."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from collm_common.settings import Common
from collm_common.types import AtLeastOne, Count, Fraction, Name, Positive

DEFAULT = "default"


class DispatcherSettings(Common, frozen=True, kw_only=True):
    """`models` maps the name clients use to the folder or hub name of its tokenizer.

    `slo_classes` maps a class name to {"ttft_s", "tpot_s", "e2e_s", "late"}; "default" is what a request without a
    class gets. `adapter_dir` is the folder below which adapters may be loaded at run time; "" refuses to.
    With `api_keys`, every client needs a key of `collm keys create`, which says whose its requests are.
    `vllm_metrics` exports what vLLM measures too once more under `vllm:` names.
    `public_url` is how clients reach this service, if not by `port` of this machine.
    Without `live_page`, nothing is shown at `/`.
    At most `max_queued` requests wait in one stream of the cell, and at most `max_open` of one stream are open at one
    ingress. There are at most `max_streams` streams; one that is of no configured class is removed when it was not
    used for `stream_idle_s`. A request of which nothing was heard for `silent_s` is looked for, and goes out again if
    it is nowhere.
    Feedback may follow for `feedback_s` after an answer, as long as the last answers fit into `feedback_mb` (0: never).
    Names: *_s are seconds; `hold_s` is how long a request may wait for others to fill a batch. A leader that dies is
    followed after 1.25 `lease_ttl_s` at the most.
    """

    models: dict[Name, str] = field(default_factory=dict)
    host: str = "0.0.0.0"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    public_url: str = ""
    api_keys: bool = False
    live_page: bool = True
    id: str = ""

    slo_classes: dict[Name, dict[str, float | str]] = field(default_factory=dict)
    max_streams: AtLeastOne = 32
    stream_idle_s: Positive = 60.0
    max_body_kb: AtLeastOne = 1024
    max_upload_mb: AtLeastOne = 64
    max_queued: AtLeastOne = 1024
    vllm_metrics: bool = False
    adapter_dir: str = ""
    max_adapter_mb: AtLeastOne = 1024
    max_open: AtLeastOne = 1024
    max_tokens: AtLeastOne = 256
    max_attempts: AtLeastOne = 5
    request_timeout_s: Positive = 300.0
    silent_s: Positive = 5.0
    feedback_mb: Count = 32
    feedback_s: Positive = 3600.0
    drain_s: Positive = 30.0
    retry_after_s: Positive = 1.0

    lease_ttl_s: Positive = 1.2
    refresh_s: Positive = 0.25
    macro_s: Positive = 0.25
    hold_s: Annotated[float, Meta(ge=0)] = 0.0
    max_held: AtLeastOne = 4096
    headroom: Fraction = 0.2
    pause_s: Positive = 1.0
    stop_s: Positive = 10.0
    resume_s: Positive = 10.0
    away_grace_s: Positive = 6.0

    @property
    def class_names(self) -> frozenset[str]:
        """The configured classes, and the default one."""
        return frozenset({DEFAULT, *self.slo_classes})
