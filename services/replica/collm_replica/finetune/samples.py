"""From records to token sequences: the prompt is read, only the answer and one EOS are learnt."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from jinja2 import TemplateError
from msgspec import Struct
from transformers import PreTrainedTokenizerBase

from collm_common.errors import DataError
from collm_replica.finetune.records import Record, parse

IGNORED = -100


class Sample(Struct, frozen=True):
    """`answer` ends with exactly one EOS."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def key(self) -> str:
        """Names the content, whatever file it came from."""
        return hashlib.sha256(repr((self.prompt, self.answer)).encode()).hexdigest()


class Dataset(Struct, frozen=True):
    """What one replica learns from and is measured on; `too_long` and `repeated` samples were left out."""

    train: tuple[Sample, ...]
    heldout: tuple[Sample, ...]
    too_long: int = 0
    repeated: int = 0


class Batch(Struct, frozen=True):
    """Tensors of shape [rows, T], padded at the end; labels are IGNORED except on answer tokens.

    Where a row holds several samples, `mask` is [rows, 1, T, T]: what each position may look at. Else it is [rows, T].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


def read_folder(folder: Path) -> list[Record]:
    """All records of all *.jsonl files below `folder`. Raises DataError that names the file."""
    records: list[Record] = []
    for path in sorted(folder.rglob("*.jsonl")):
        try:
            records += parse(path.read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: byte {error.start} is not UTF-8") from error
        except DataError as error:
            raise DataError(f"{path}: {error}", field=error.field) from error
    return records


def tokenise(record: Record, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """A chat goes through the model's template, a bare prompt does not.

    An answer that spells out the EOS ends there, as it would when generated. Raises DataError.
    """
    answer = list(tokenizer(record.answer, add_special_tokens=False)["input_ids"])
    eos = int(tokenizer.eos_token_id)
    if eos in answer:
        answer = answer[: answer.index(eos)]
    return Sample(tuple(_prompt(record, tokenizer)), (*answer, eos))


def build(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, max_tokens: int, heldout: int) -> Dataset:
    """Tokenise, leave out repeated and too long ones, and hold out the `heldout` samples whose content hash is lowest.

    The split depends on nothing but the samples, so every replica and every restart makes the same one. At most a
    quarter is held out, so that a small set still has something to learn from.
    """
    found: dict[str, Sample] = {}
    too_long = repeated = 0
    for record in records:
        sample = tokenise(record, tokenizer)
        if len(sample.prompt) + len(sample.answer) > max_tokens:
            too_long += 1
        elif sample.key in found:
            repeated += 1
        else:
            found[sample.key] = sample
    ordered = [found[key] for key in sorted(found)]
    cut = min(heldout, max(1, len(ordered) // 4)) if len(ordered) > 1 else 0
    return Dataset(tuple(ordered[cut:]), tuple(ordered[:cut]), too_long, repeated)


def draws(samples: Sequence[Sample], seed: int) -> Iterator[Sample]:
    """For ever, each epoch in a new order. Raises DataError when there are none."""
    if not samples:
        raise DataError("no samples to draw from")
    epoch = 0
    while True:
        order = list(samples)
        random.Random(f"{seed} {epoch}").shuffle(order)
        yield from order
        epoch += 1


def collate(samples: Sequence[Sample], pad: int, pack: bool = False) -> Batch:
    """Pads by length: `pad` may be the EOS, which stays in the loss where it ends an answer.

    With `pack`, short samples share a row as long as the longest one; none sees another, or learns from another's end.
    """
    longest = max(map(_length, samples))
    rows = _packed(samples, longest) if pack else [[sample] for sample in samples]
    ids = torch.full((len(rows), longest), pad, dtype=torch.long)
    labels, positions, owner = torch.full_like(ids, IGNORED), torch.zeros_like(ids), torch.zeros_like(ids)
    for row, together in enumerate(rows):
        start = 0
        for number, sample in enumerate(together, 1):
            answer, end = start + len(sample.prompt), start + _length(sample)
            ids[row, start:end] = torch.tensor(sample.prompt + sample.answer)
            labels[row, answer:end] = torch.tensor(sample.answer)
            labels[row, start] = IGNORED
            positions[row, start:end] = torch.arange(end - start)
            owner[row, start:end] = number
            start = end
    alone = len(rows) == len(samples)
    return Batch(ids, positions, (owner > 0).long() if alone else _own_past(owner), labels)


def _length(sample: Sample) -> int:
    return len(sample.prompt) + len(sample.answer)


def _packed(samples: Sequence[Sample], room: int) -> list[list[Sample]]:
    """Rows of at most `room` tokens: the longest first, each into the first row that has room for it."""
    rows: list[list[Sample]] = []
    left: list[int] = []
    for sample in sorted(samples, key=_length, reverse=True):
        size = _length(sample)
        row = next((row for row, free in enumerate(left) if free >= size), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(sample)
        left[row] -= size
    return rows


def _own_past(owner: torch.Tensor) -> torch.Tensor:
    """[rows, 1, T, T]: whether the position of axis 2 may look at that of axis 3. Padding looks at padding alone."""
    same = owner[:, None, :, None] == owner[:, None, None, :]
    return same.tril()


def _prompt(record: Record, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [{"role": role, "content": content} for role, content in record.messages]
    if not record.chat or tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    # As text first: the token form of the template call differs between transformers versions.
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        roles = ", ".join(role for role, _ in record.messages)
        raise DataError(f"the model's chat template refuses the roles {roles}: {error}", field="messages") from error
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
