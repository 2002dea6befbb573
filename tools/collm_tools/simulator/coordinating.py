"""The live coordinator's probes, fits and choices in virtual time: what its `service.py` does around them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from collm_common.latency import LatencyModel
from collm_common.messages import InferenceReport, TrainReport
from collm_common.types import BatchSizes, ReplicaState, Slo
from collm_coordinator.advisor import Member, Rules, choose, demand_on, probe, rate_to_carry
from collm_coordinator.probing import Cell
from collm_coordinator.replica_model import ReplicaModel
from collm_coordinator.solver import first_draw, keeps_slo
from collm_tools.simulator.replica import Replica


class CoordinatorRules(Struct, frozen=True):
    """As the live settings of the same names; `pair` fixes (B, b) for good, as the paper's comparison does.

    A replica is fitted at most every `fit_s`, where the live one fits every few seconds and at each round's end: a
    robust fit takes as long as thousands of simulated requests.
    """

    slo: Slo
    max_train_batch: int = 16
    first_train_max: int = 4
    min_infer_share: float = 0.25
    accumulation: int = 8
    probe_steps: int = 2
    fit_s: float = 0.0
    seed: int = 0
    pair: BatchSizes | None = None

    @property
    def advice(self) -> Rules:
        """What the live coordinator's choices keep to."""
        return Rules(self.slo, self.max_train_batch, self.min_infer_share)


class Coordinating:
    """One model's replicas. `latency` is written for the dispatcher to read; `touch` hears whose sizes were changed."""

    def __init__(
        self,
        rules: CoordinatorRules,
        replicas: Mapping[str, Replica],
        latency: dict[str, LatencyModel],
        touch: Callable[[Replica], None],
    ) -> None:
        self.rules, self.latency = rules, latency
        self.sizes: dict[str, BatchSizes] = {}
        self._touch = touch
        self._probed: defaultdict[str, set[Cell]] = defaultdict(set)
        self._replicas = replicas
        self._due_s: dict[str, float] = {}
        self._models = {id_: ReplicaModel() for id_ in replicas}

    def hear(self, report: InferenceReport | TrainReport) -> None:
        """Telemetry."""
        model = self._models[report.replica]
        if isinstance(report, TrainReport):
            model.observe_training(report)
        else:
            model.observe_inference(report)

    def probe(self, now: float, replica: Replica, report: TrainReport) -> None:
        """In a job's first round, and until the law is told: another B after every few steps."""
        model, steps, known = self._models[replica.id], self.rules.probe_steps, self.sizes.get(replica.id)
        if not steps or self.rules.pair is not None or known is None or model.progress.steps < steps:
            return
        law = model.laws.get(model.share)
        if report.round > 1 and law is not None and law.infer.train_identified:
            return
        asked = self._probed[report.job]
        found = probe(model, list(self._models.values()), asked, self.rules.advice)
        model.progress.steps = 0
        if found is None:
            return
        asked.add((found.sizes.train, found.sizes.infer))
        if found.sizes.train != known.train:
            self._configure(now, replica, structs.replace(known, train=found.sizes.train))

    def first(self, now: float, job: str, replica: Replica) -> None:
        """Sizes for a replica that joins a job: a draw of its own."""
        sizes = self.rules.pair
        if sizes is None:
            sizes = first_draw(f"{self.rules.seed} {job} {replica.id}", self.rules.first_train_max, replica.most)
            self._models[replica.id].progress.start(job, sizes.train)
        self._configure(now, replica, sizes)

    def restore(self, now: float, replica: Replica) -> None:
        """It trains no more."""
        self._configure(now, replica, BatchSizes(0, replica.most))

    def fit(self, now: float) -> None:
        """Fit whoever has new samples; sizes that do not keep the objective are replaced at once."""
        for replica in self._replicas.values():
            self.refit(now, replica, settle=False)

    def refit(self, now: float, replica: Replica, settle: bool) -> None:
        """`settle`: a round is over, the sizes of the next one are due."""
        model, combined = self._models[replica.id], replica.state is ReplicaState.COMBINED
        if now >= self._due_s.get(replica.id, 0.0):
            self._due_s[replica.id] = now + self.rules.fit_s
            model.refit(list(self._models.values()))
        law = model.latency
        if law is None:
            return
        self.latency[replica.id] = law
        if self.rules.pair is not None or not combined or law.train is None or not (settle or replica.train):
            return
        rules, known = self.rules.advice, self.sizes.get(replica.id)
        if not settle and known is not None and keeps_slo(law, known, demand_on(model, law, rules)):
            return
        members = {id_: self._member(peer) for id_, peer in self._replicas.items()}
        rate = rate_to_carry(replica.id, members.values(), 0, rules)
        self._configure(now, replica, choose(members[replica.id], law, rules, rate).sizes)

    def _member(self, replica: Replica) -> Member:
        return Member(replica.id, replica.state, replica.most, self._models[replica.id], self.rules.accumulation)

    def _configure(self, now: float, replica: Replica, sizes: BatchSizes) -> None:
        self.sizes[replica.id] = sizes
        self._models[replica.id].progress.ask(sizes.train)
        replica.configure(now, sizes.infer, sizes.train if replica.train else 0, replica.paused)
        self._touch(replica)
