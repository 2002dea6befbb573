"""From tokens to text: characters, stop strings, ends."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import SamplingParams
from collm_replica.engine.detokenizer import Detokenizer
from collm_replica.engine.output import Output
from collm_replica.engine.stops import StopFinder
from tests.support.models import EOS_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(tokens: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(tokens), skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return [int(token) for token in TOKENIZER(text)["input_ids"]]


def read(output: Output, tokens: Sequence[int]) -> list[str]:
    """The pieces of text, up to the end of the answer."""
    return [output.push(token) for token in tokens if output.finish is None]


def answer(prefix: Sequence[int] = (), **params: object) -> Output:
    sampling = SamplingParams(**{"max_tokens": 1000} | params)  # type: ignore[arg-type]
    return Output(sampling, frozenset({EOS_ID}), decode, prefix)


@given(st.text(max_size=40))
def test_pieces_are_whole_characters_and_make_the_text(text: str) -> None:
    """Catches half a character shown, and text lost or repeated at piece boundaries."""
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token) for token in encode(text)]
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.integers(0, 259), max_size=60))
def test_any_tokens_make_the_text_of_the_whole(tokens: list[int]) -> None:
    """Catches bytes that are no characters: they must neither block the stream nor corrupt what follows."""
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == decode(tokens)


def test_invalid_bytes_do_not_block_the_stream() -> None:
    """Catches a stream that stands still, and work that grows with its square, behind one bad byte."""
    bad = encode("é")[:1]
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.push(token) for token in bad * 30]
    assert len("".join(pieces)) >= 20
    euro = encode("€")
    for half in (euro[:2], euro[:1]):
        detokenizer = Detokenizer(decode)
        shown = "".join(detokenizer.push(token) for token in [*bad * 8, *half])
        assert shown.count("\ufffd") <= 8
        rest = "".join(detokenizer.push(token) for token in euro[len(half) :])
        assert (shown + rest).endswith("€")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_text_ends_before_the_first_stop_string(text: str, stops: list[str], size: int) -> None:
    """Catches a stop string shown in part, missed across pieces, or one that swallows text for ever."""
    finder = StopFinder(tuple(stops))
    shown = "".join(finder.push(text[at : at + size]) for at in range(0, len(text), size)) + finder.flush()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert finder.found == bool(ends)
    if size == 1 and ends:
        first = min(ends)
        assert shown == text[: min(first - len(stop) for stop in stops if text[:first].endswith(stop))]
    if not ends:
        assert shown == text
    else:
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)


def test_an_end_that_may_begin_a_stop_string_is_held_back() -> None:
    """Catches half a stop string shown before it was known to be one."""
    finder = StopFinder(("END", ""))
    assert [finder.push(piece) for piece in ("one E", "N", "X two EN", "D three")] == ["one ", "", "ENX two ", ""]
    assert finder.found


def test_stop_strings_end_an_answer_and_are_not_shown() -> None:
    """Catches the stop string in the text and an answer that goes on."""
    output = answer(stop=("\n\n",))
    assert "".join(read(output, encode("one\ntwo\n\nthree"))) == "one\ntwo"
    assert output.finish == "stop"
    assert len(output.tokens) == len("one\ntwo\n\n")


def test_stop_strings_count_once_an_answer_is_long_enough() -> None:
    """Catches an answer shorter than was asked for."""
    output = answer(stop=("x",), min_tokens=3)
    assert "".join(read(output, encode("axbcxd"))) == "axbc"
    assert output.finish == "stop"


def test_eos_ends_an_answer_unless_ignored() -> None:
    """Catches answers that never end, EOS shown as text, and held text lost at the end."""
    tokens = [*encode("one E"), EOS_ID, *encode("two")]
    output = answer(stop=("END",))
    assert "".join(read(output, tokens)) == "one E"
    assert output.finish == "stop"
    ignoring = answer(ignore_eos=True)
    assert "".join(read(ignoring, tokens)) == "one Etwo"
    assert ignoring.finish is None


def test_length_ends_an_answer_with_all_its_text() -> None:
    """Catches text that is still held back when the last token came."""
    output = answer(max_tokens=5, stop=("END",))
    assert "".join(read(output, encode("one E and more"))) == "one E"
    assert output.finish == "length"
    half = answer(max_tokens=1)
    assert read(half, encode("é")) == ["\ufffd"]


@given(st.text(max_size=12), st.data())
def test_an_answer_goes_on_behind_its_prefix(text: str, data: st.DataObject) -> None:
    """Catches a client that sees text twice or misses some after its replica died."""
    tokens = encode(text + " STOP more")
    cut = data.draw(st.integers(0, len(tokens)))
    whole, first = answer(stop=(" STOP",)), answer(stop=(" STOP",))
    before = read(first, tokens[:cut])
    second = answer(tokens[:cut], stop=(" STOP",))
    assert second.finish == first.finish
    assert "".join(before + read(second, tokens[cut:])) == "".join(read(whole, tokens))
