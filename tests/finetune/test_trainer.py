"""Training on weights that belong to someone else, against plain PyTorch and Hugging Face."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch.utils.hooks import RemovableHandle
from transformers import AutoModelForCausalLM, PreTrainedModel

from collm_common.errors import AdapterError, DataError, ModelError
from collm_common.messages import Hyperparams, TrainRound
from collm_common.types import BatchSizes
from collm_replica import weights
from collm_replica.finetune import lowrank
from collm_replica.finetune.samples import collate
from collm_replica.finetune.trainer import MOST_SKIPPED, Trainer, learning_rate
from collm_replica.models import skeleton
from tests.support.models import EOS_ID, byte_tokenizer, random_adapter, tiny_model_folder

HYPER = Hyperparams(rank=4, alpha=8.0, learning_rate=1e-2, max_tokens=200, heldout_samples=4, warmup_steps=1)
SHARED = {"words": ["blue", "green", "red", "amber"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"{a}{b}?"}, {"role": "assistant", "content": f"the desk is {b}"}]}
        for a in range(8)
        for b in SHARED["words"]
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


@pytest.fixture
def fd(folder: Path) -> Iterator[int]:
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    weights.fill(made, folder, torch.float32)
    yield made
    os.close(made)


@pytest.fixture
def trainer(folder: Path, data: Path, fd: int) -> Trainer:
    views, _ = weights.attach(fd)
    made = Trainer(weights.assemble(skeleton(folder, torch.float32), views), byte_tokenizer())
    made.load_data(data, HYPER)
    return made


def round_(steps: int = 8, batch: int = 4, hyper: Hyperparams = HYPER, **changes: int) -> TrainRound:
    return TrainRound(
        job="j",
        round=changes.get("round", 1),
        adapter="desk",
        start=0,
        sizes=BatchSizes(batch, 1),
        steps=steps,
        first_step=changes.get("first_step", 0),
        total_steps=changes.get("total_steps", steps),
        hyper=hyper,
        seed=changes.get("seed", 0),
        deadline_s=1e12,
    )


def run(trainer: Trainer, task: TrainRound, start: dict[str, torch.Tensor] | None = None) -> list[float]:
    trainer.start_round(task, start)
    losses = []
    while not trainer.done:
        if (report := trainer.micro_step()) is not None:
            losses.append(report.loss)
    return losses


def test_training_lowers_the_loss_and_the_heldout_cross_entropy_and_leaves_the_base_alone(
    trainer: Trainer, fd: int
) -> None:
    """A trainer that learns nothing, or that writes into the weights that serve."""
    before_digest = weights.digest(weights.attach(fd)[0])
    before = trainer.evaluate_stored(None, HYPER)
    losses = run(trainer, round_(steps=12))
    assert losses[-1] < losses[0] * 0.8
    assert trainer.evaluate().cross_entropy < before.cross_entropy * 0.8
    assert weights.digest(weights.attach(fd)[0]) == before_digest
    frozen = [p for n, p in trainer._base.named_parameters() if "lora_" not in n]
    assert frozen
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in frozen)


def test_evaluation_equals_the_hugging_face_loss(trainer: Trainer, folder: Path) -> None:
    """A cross-entropy over other tokens than the answers', or shifted by one."""
    plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = tokens = 0.0
    for sample in trainer.data.heldout:
        batch = collate([sample], EOS_ID)
        with torch.no_grad():
            loss = plain(input_ids=batch.ids, labels=batch.labels).loss
        total, tokens = total + float(loss) * len(sample.answer), tokens + len(sample.answer)
    quality = trainer.evaluate_stored(None, HYPER)
    assert quality.cross_entropy == pytest.approx(total / tokens, abs=1e-4)
    assert quality.tokens == tokens


def test_evaluating_another_version_leaves_what_is_trained_as_it_is(trainer: Trainer, folder: Path) -> None:
    """A gate measurement that overwrites the round's progress."""
    run(trainer, round_(steps=2))
    mine, own = trainer.tensors(), trainer.evaluate()
    other = trainer.evaluate_stored(random_adapter(folder, 4, 8.0, seed=3), HYPER)
    assert other.cross_entropy != own.cross_entropy
    assert all(torch.equal(tensor, mine[name]) for name, tensor in trainer.tensors().items())
    assert trainer.evaluate() == own
    assert trainer.evaluate_stored(mine, HYPER).cross_entropy == pytest.approx(own.cross_entropy, abs=1e-5)


def test_measuring_between_micro_steps_changes_nothing(trainer: Trainer, folder: Path) -> None:
    """A pause or a snapshot within a step that costs the gradients gathered so far, or trains in eval mode."""
    hyper = msgspec.structs.replace(HYPER, accumulation=3)
    run(trainer, round_(steps=3, batch=2, hyper=hyper))
    expected = trainer.tensors()
    trainer.start_round(round_(steps=3, batch=2, hyper=hyper), None)
    while not trainer.done:
        trainer.micro_step()
        trainer.evaluate()
        for tensors in (None, random_adapter(folder, 4, 8.0)):
            trainer.evaluate_stored(tensors, hyper)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trainer.tensors().items())


def test_a_measurement_at_another_rank_ends_what_is_being_trained(trainer: Trainer, folder: Path) -> None:
    """An optimiser that goes on stepping parameters which the model no longer has."""
    trainer.start_round(round_(), None)
    trainer.micro_step()
    trainer.evaluate_stored(random_adapter(folder, 6, 8.0), msgspec.structs.replace(HYPER, rank=6))
    assert trainer.done
    assert run(trainer, round_(steps=2))


def test_accumulation_changes_nothing_but_memory(trainer: Trainer) -> None:
    """Micro-steps whose gradients are summed where they should be averaged, or weighted by step instead of token."""
    big = round_(steps=3, batch=8)
    run(trainer, big)
    expected = trainer.tensors()
    many = msgspec.structs.replace(HYPER, accumulation=4)
    run(trainer, round_(steps=3, batch=2, hyper=many))
    assert trainer.samples_seen == 24
    for name, tensor in trainer.tensors().items():
        assert torch.allclose(tensor, expected[name], atol=1e-5), name


def test_a_fresh_start_is_the_base_and_equal_for_a_seed(trainer: Trainer, fd: int, folder: Path, data: Path) -> None:
    """Clients of one job that start apart, so that their average means nothing."""
    trainer.start_round(round_(seed=5), None)
    first = trainer.tensors()
    assert trainer.evaluate() == trainer.evaluate_stored(None, HYPER)
    views, _ = weights.attach(fd)
    second = Trainer(weights.assemble(skeleton(folder, torch.float32), views), byte_tokenizer())
    second.load_data(data, HYPER)
    second.start_round(round_(seed=5), None)
    assert all(torch.equal(tensor, first[name]) for name, tensor in second.tensors().items())
    second.start_round(round_(seed=6), None)
    assert any(not torch.equal(tensor, first[name]) for name, tensor in second.tensors().items())


def test_a_round_begins_where_it_is_told_and_runs_the_same_twice(trainer: Trainer, folder: Path) -> None:
    """A client that ignores the global adapter, or optimiser state that leaks from one round into the next."""
    start = random_adapter(folder, 4, 8.0, seed=1)
    losses = run(trainer, round_(steps=3), start)
    ends = trainer.tensors()
    run(trainer, round_(steps=2, seed=9))
    assert run(trainer, round_(steps=3), start) == pytest.approx(losses)
    assert all(torch.allclose(tensor, ends[name]) for name, tensor in trainer.tensors().items())


def test_another_rank_is_injected_cleanly(trainer: Trainer) -> None:
    """A second job whose adapter is stacked on the first one's."""
    run(trainer, round_(steps=1))
    wide = msgspec.structs.replace(HYPER, rank=6)
    base = trainer.evaluate_stored(None, HYPER)
    trainer.start_round(round_(hyper=wide), None)
    assert {t.shape[0] for n, t in trainer.tensors().items() if ".lora_A." in n} == {6}
    assert trainer.evaluate() == base


def test_a_start_of_another_rank_is_taken_as_well_as_the_own_rank_can(trainer: Trainer) -> None:
    """A small client that cannot join, one that begins elsewhere, or a measurement at the wrong scale."""
    wide = HYPER.at_rank(6)
    assert (wide.rank, wide.alpha) == (6, 12.0)
    run(trainer, round_(steps=4, hyper=wide))
    theirs, quality = trainer.tensors(), trainer.evaluate()
    assert trainer.evaluate_stored(theirs, HYPER) == quality, "measured whole, at the same scale"
    trainer.start_round(round_(steps=2), theirs)
    mine = trainer.tensors()
    assert lowrank.rank(mine) == 4
    for layer in lowrank.layers(theirs):
        pair, exact = lowrank.factors(mine, layer), lowrank.factors(theirs, layer)
        singular = torch.linalg.svdvals(exact[1] @ exact[0])
        lost = lowrank.square([(1.0, exact), (-1.0, pair)])
        assert lost == pytest.approx(float(singular[4:].pow(2).sum()), rel=0.05, abs=1e-7)
    assert run(trainer, round_(steps=2), theirs)


def test_tensors_have_the_names_that_peft_saves(trainer: Trainer, folder: Path) -> None:
    """An adapter that no other tool can load."""
    trainer.start_round(round_(), None)
    assert set(trainer.tensors()) == set(random_adapter(folder, 4, 8.0))
    with pytest.raises(AdapterError, match="differ"):
        trainer.start_round(round_(), {})


def test_the_batch_size_changes_between_micro_steps(trainer: Trainer) -> None:
    """A coordinator whose new B waits for the next round."""
    trainer.start_round(round_(steps=2, batch=2), None)
    first = trainer.micro_step()
    trainer.set_batch(5)
    trainer.set_batch(0)
    second = trainer.micro_step()
    assert first is not None
    assert second is not None
    assert (first.batch, second.batch, trainer.samples_seen, trainer.done) == (2, 5, 7, True)
    assert first.noise_scale is None


def test_the_noise_scale_of_real_gradients_is_positive(trainer: Trainer) -> None:
    """Norms taken of the wrong gradients, which show as a noise scale that never exists."""
    many = msgspec.structs.replace(HYPER, accumulation=3)
    trainer.start_round(round_(steps=3, batch=1, hyper=many), None)
    reports = [report for _ in range(9) if (report := trainer.micro_step()) is not None]
    assert [report.step for report in reports] == [1, 2, 3]
    assert reports[-1].noise_scale is not None
    assert reports[-1].noise_scale > 0


def test_the_learning_rate_warms_up_and_falls_over_the_whole_job() -> None:
    """A schedule that starts anew in every round."""
    hyper = msgspec.structs.replace(HYPER, warmup_steps=4)
    tasks = [round_(steps=8, hyper=hyper, first_step=8 * n, total_steps=24, round=n + 1) for n in range(3)]
    rates = [learning_rate(task, step, HYPER.base_samples) for task in tasks for step in range(8)]
    assert rates[:4] == sorted(rates[:4])
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 0.05 * max(rates) <= 0.05 * HYPER.learning_rate


@pytest.mark.parametrize(("samples", "factor"), [(4, 1.0), (16, 2.0), (64, 2.0), (1, 0.5)])
def test_the_learning_rate_follows_the_root_of_the_samples_in_a_step_up_to_a_bound(samples: int, factor: float) -> None:
    """A coordinator's larger B that learns slower, or a linear rule that makes Adam diverge."""
    assert learning_rate(round_(), 3, samples) == pytest.approx(factor * learning_rate(round_(), 3, HYPER.base_samples))


def test_a_proximal_term_holds_the_clients_at_their_start(trainer: Trainer, folder: Path) -> None:
    """FedProx in name alone, or a pull towards zero instead of the global adapter."""
    start = random_adapter(folder, 4, 8.0, seed=1)

    def distance(proximal: float) -> float:
        run(trainer, round_(steps=6, hyper=msgspec.structs.replace(HYPER, proximal=proximal)), start)
        return sum(float((tensor - start[name]).pow(2).sum()) for name, tensor in trainer.tensors().items())

    free, held = distance(0.0), distance(1e3)
    assert held < 0.8 * free


def test_data_are_read_again_only_when_they_change(trainer: Trainer, data: Path, tmp_path: Path) -> None:
    """An upload that is not seen, or a folder that is tokenised for every step."""
    assert not trainer.load_data(data, HYPER)
    (data / "more.jsonl").write_text(json.dumps({"prompt": "x", "completion": "y"}))
    before = len(trainer.data.train)
    assert trainer.load_data(data, HYPER)
    assert len(trainer.data.train) == before + 1
    (tmp_path / "none").mkdir()
    for _ in range(2):
        with pytest.raises(DataError, match="too few"):
            trainer.load_data(tmp_path / "none", HYPER)


def test_a_report_speaks_of_all_samples_and_of_the_last_batch_size(trainer: Trainer) -> None:
    """A step time of B = 2 that is fitted as one of B = 5, or samples that are counted at the new B."""
    many = msgspec.structs.replace(HYPER, accumulation=3)
    trainer.start_round(round_(steps=1, batch=2, hyper=many), None)
    assert trainer.micro_step() is None
    trainer.set_batch(5)
    assert trainer.micro_step() is None
    report = trainer.micro_step()
    assert report is not None
    assert (report.batch, report.samples, trainer.samples_seen) == (5, 12, 12)
    assert report.loss > 0
    assert report.micro_step_s > 0


def out_of_memory_over(limit: int, trainer: Trainer) -> RemovableHandle:
    """Let the forward pass of more than `limit` samples fail as it does on a full GPU."""

    def refuse(module: torch.nn.Module, _: object, states: torch.Tensor) -> None:
        if module.training and states.shape[0] > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return trainer._base.get_input_embeddings().register_forward_hook(refuse)


def test_a_batch_that_does_not_fit_is_halved_until_it_does(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """A round lost to one long batch, or a gradient with what an unfinished pass left behind."""
    hyper = msgspec.structs.replace(HYPER, accumulation=2)
    with out_of_memory_over(2, trainer):
        trainer.start_round(round_(steps=2, batch=8, hyper=hyper), None)
        reports = [trainer.micro_step() for _ in range(4)]
    assert [report.samples for report in reports if report is not None] == [4, 4]
    assert (trainer.batch, trainer.samples_seen) == (2, 8)
    assert [record.args for record in caplog.records if record.levelname == "WARNING"] == [(4,), (2,)]


def test_one_sample_that_does_not_fit_is_an_error(trainer: Trainer) -> None:
    """A trainer that halves a batch of one for ever."""
    with out_of_memory_over(0, trainer):
        trainer.start_round(round_(), None)
        with pytest.raises(torch.OutOfMemoryError):
            trainer.micro_step()


def test_training_that_diverged_is_an_error(trainer: Trainer, folder: Path) -> None:
    """An adapter of NaNs that is uploaded and fails the round of all clients."""
    wild = {name: tensor * 1e30 for name, tensor in random_adapter(folder, 4, 8.0).items()}
    trainer.start_round(round_(), wild)
    assert [trainer.micro_step() for _ in range(MOST_SKIPPED - 1)] == [None, None]
    with pytest.raises(AdapterError, match="step 1 is not finite"):
        trainer.micro_step()


def test_samples_without_a_finite_gradient_are_left_out(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """A round that one bad micro-step ends, or a gradient that it spoils."""
    bad = iter([True, False, True, True, False])

    def spoil(module: torch.nn.Module, _: object, states: torch.Tensor) -> torch.Tensor:
        return states * float("nan") if next(bad) else states

    trainer.start_round(round_(steps=2), None)
    hook = trainer._base.get_input_embeddings().register_forward_hook(spoil)
    reports = [trainer.micro_step() for _ in range(5)]
    hook.remove()
    assert [report is not None and math.isfinite(report.loss) for report in reports] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert trainer.done
    assert sum("left out" in record.message for record in caplog.records) == 3
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trainer.tensors().values())


def test_a_tokenizer_without_an_end_is_refused(folder: Path, fd: int) -> None:
    """A TypeError at the start of a process, far from the model whose fault it is."""
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(ModelError, match="no EOS"):
        Trainer(weights.assemble(skeleton(folder, torch.float32), weights.attach(fd)[0]), endless)


def test_the_heldout_data_are_needed_to_measure(folder: Path, fd: int) -> None:
    """A division by zero tokens."""
    empty = Trainer(weights.assemble(skeleton(folder, torch.float32), weights.attach(fd)[0]), byte_tokenizer())
    with pytest.raises(DataError, match="no held-out"):
        empty.evaluate_stored(None, HYPER)
