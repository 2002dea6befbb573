"""What people write becomes what is learnt: nothing more, nothing less, and a bad line is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collm_common.errors import DataError
from collm_replica.finetune.records import MAX_ERRORS, Record, check_text, parse
from collm_replica.finetune.samples import IGNORED, Sample, build, collate, draws, read_folder, tokenise
from tests.support.models import EOS_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()


def records(count: int, length: int = 3) -> list[Record]:
    return [Record((("user", f"question {n}"),), f"{n}" * length) for n in range(count)]


def test_every_accepted_shape_becomes_a_record() -> None:
    """A documented data format that is refused."""
    lines = [
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a"},
            ]
        },
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "i", "output": "a"},
    ]
    assert parse("\n".join(map(json.dumps, lines))) == [
        Record((("system", "s"), ("user", "q")), "a"),
        Record((("user", "q"),), "a", chat=False),
        Record((("user", "q"),), "a"),
        Record((("user", "q\n\ni"),), "a"),
    ]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "one object per line"),
        ("[1]", "one object per line"),
        ("[" * 100_000, "one object per line"),
        ('{"prompt": "q", "completion": "a", "n": ' + "9" * 5000 + "}", "one object per line"),
        ('{"prompt": "q", "completion": "\\ud800"}', "completion"),
        ('{"text": "x"}', "messages"),
        ('{"prompt": "q"}', "completion"),
        ('{"prompt": "", "completion": "a"}', "prompt"),
        ('{"instruction": "q", "output": 3}', "output"),
        ('{"messages": []}', "messages"),
        ('{"messages": ["x", "y"]}', r"messages\[0\]"),
        (
            '{"messages": [{"role": "robot", "content": "x"}, {"role": "assistant", "content": "x"}]}',
            r"messages\[0\]\.role",
        ),
        ('{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x"}]}', "assistant"),
        ('{"messages": [{"role": "user"}, {"role": "assistant", "content": "x"}]}', r"messages\[0\]\.content"),
    ],
)
def test_a_bad_line_is_named_with_its_field(line: str, named: str) -> None:
    """An "invalid schema" that leaves its reader to search thousands of lines."""
    with pytest.raises(DataError, match=rf"line 2: .*{named}"):
        check_text(json.dumps({"prompt": "q", "completion": "a"}) + "\n" + line)


def test_only_a_newline_ends_a_line() -> None:
    """Text with a line separator of Unicode, which JSON may hold as it is, cut in two and refused."""
    lines = [json.dumps({"prompt": "q", "completion": text}, ensure_ascii=False) for text in ("a\u2028b", "c\x85d")]
    assert [record.answer for record in parse("\r\n".join(lines))] == ["a\u2028b", "c\x85d"]


def test_the_first_errors_are_listed_together_and_bounded() -> None:
    """One upload for each mistake, or an error of a megabyte."""
    with pytest.raises(DataError) as caught:
        check_text("x\n" * 1000)
    assert str(caught.value).count("line ") == MAX_ERRORS
    with pytest.raises(DataError, match="no samples"):
        check_text("\n\n")


def test_the_prompt_is_masked_and_one_eos_is_kept() -> None:
    """A model that learns to repeat the question, or that never stops because padding hides its EOS."""
    samples = [
        tokenise(record, TOKENIZER)
        for record in (*records(2), Record((("user", "q"),), "long answer<|im_end|><|im_end|>, and more"))
    ]
    assert all(sample.answer[-1] == EOS_ID for sample in samples)
    assert TOKENIZER.decode(list(samples[2].answer[:-1])) == "long answer"
    assert [sample.answer.count(EOS_ID) for sample in samples] == [1, 1, 1]
    batch = collate(samples, pad=EOS_ID)
    assert batch.mask.shape == batch.ids.shape
    for row, sample in enumerate(samples):
        learnt = [int(label) for label in batch.labels[row] if label != IGNORED]
        assert tuple(learnt) == sample.answer
        length = len(sample.prompt) + len(sample.answer)
        assert int(batch.mask[row].sum()) == length
        assert tuple(batch.ids[row, :length].tolist()) == sample.prompt + sample.answer


def test_the_prompt_is_what_the_server_renders() -> None:
    """Training on another prompt format than the one that is served."""
    sample = tokenise(Record((("user", "hi"),), "yes"), TOKENIZER)
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert TOKENIZER.decode(list(sample.prompt)) == rendered
    assert TOKENIZER.decode(list(tokenise(Record((("user", "hi"),), "yes", chat=False), TOKENIZER).prompt)) == "hi"


def test_the_split_depends_on_the_samples_alone_and_never_overlaps() -> None:
    """A held-out answer that was trained on after a restart in another order."""
    there, back = (build(order, TOKENIZER, 200, 5) for order in (records(40), records(40)[::-1]))
    assert there == back
    assert len(there.heldout) == 5
    assert not {s.key for s in there.train} & {s.key for s in there.heldout}
    assert len(build(records(4), TOKENIZER, 200, 5).heldout) == 1


def test_repeated_and_long_samples_are_left_out_and_counted() -> None:
    """A sample that weighs double, or one that is cut in the middle of its answer."""
    dataset = build([*records(5), *records(3), *records(1, length=500)], TOKENIZER, 200, 2)
    assert (len(dataset.train) + len(dataset.heldout), dataset.repeated, dataset.too_long) == (5, 3, 1)


def test_an_epoch_draws_each_sample_once_and_repeats_by_seed() -> None:
    """Samples that are never seen, or two runs that differ."""
    samples = [Sample((n,), (n, EOS_ID)) for n in range(10)]
    first, again, other = (draws(samples, seed) for seed in (1, 1, 2))
    epochs = [[next(first) for _ in range(10)] for _ in range(2)]
    assert [sorted(s.prompt for s in epoch) for epoch in epochs] == [[(n,) for n in range(10)]] * 2
    assert epochs[0] != epochs[1]
    assert [next(again) for _ in range(10)] == epochs[0] != [next(other) for _ in range(10)]


def test_a_folder_is_read_as_a_whole(tmp_path: Path) -> None:
    """Uploads in a folder below that are never trained on."""
    (tmp_path / "uploads").mkdir()
    for name in ("a.jsonl", "uploads/b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name, "completion": "x"}))
    (tmp_path / "notes.txt").write_text("not data")
    assert [record.messages[0][1] for record in read_folder(tmp_path)] == ["a.jsonl", "uploads/b.jsonl"]


@pytest.mark.parametrize(("content", "why"), [(b"\xff", "not UTF-8"), (b'{"prompt": "q"}', "line 1: completion")])
def test_a_bad_file_in_the_folder_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    """A "line 3" of one file among hundreds, or a training process that dies of a byte."""
    (tmp_path / "good.jsonl").write_text(json.dumps({"prompt": "q", "completion": "a"}))
    (tmp_path / "worse.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"worse\.jsonl: .*{why}"):
        read_folder(tmp_path)


def test_roles_that_the_template_refuses_are_an_error_of_the_data() -> None:
    """A foreign exception out of a model's template, which ends the training process again and again."""
    strict = byte_tokenizer()
    strict.chat_template = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    strict.chat_template += "{% endif %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match=r"system, user.*no system"):
        tokenise(Record((("system", "s"), ("user", "q")), "a"), strict)


def test_nothing_to_draw_from_is_an_error() -> None:
    """A micro-step that looks for a sample for ever."""
    with pytest.raises(DataError, match="no samples"):
        next(draws([], 1))
