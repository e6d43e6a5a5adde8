"""Stop strings, the word mapping and the making of pieces, without a server."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import ByteTokenizer

from engine.serving.output import Output
from engine.serving.text import StopStrings, WordTokenizer
from engine.serving.worker import WireEvent

text = st.text("abc", max_size=30)


@given(text, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_however_the_text_comes(whole: str, stops: list[str], cuts: list[int]) -> None:
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    cutter = StopStrings(stops)
    said = ""
    at = sorted({0, len(whole), *(c for c in cuts if c < len(whole))})
    for a, b in itertools.pairwise(at):
        said += cutter.add(whole[a:b])
    # What is given out is never taken back, and a stop that comes in pieces may be found later than a longer one.
    assert whole.startswith(said)
    if not found:
        assert said + cutter.rest() == whole
    else:
        assert cutter.stopped
        assert any(whole.startswith(stop, len(said)) for stop in stops)


@given(st.lists(st.integers(0, 999), max_size=20))
def test_words_come_back_as_their_tokens(tokens: list[int]) -> None:
    tokenizer = WordTokenizer(1000)
    assert tokenizer.encode(tokenizer.decode(tokens)) == tokens


def test_words_that_are_no_tokens() -> None:
    tokenizer = WordTokenizer(1000)
    tokens = tokenizer.encode("hello 1000 ٣ 99999999999 7")
    assert len(tokens) == 5
    assert all(0 <= token < 1000 for token in tokens)
    assert tokens[-1] == 7


def event(*tokens: int, finished: str | None = None) -> WireEvent:
    return WireEvent("r", tokens, 0.0, finished, 0, None, None)


def test_what_has_waited_becomes_one_piece() -> None:
    output = Output(ByteTokenizer(), 3, (), False)
    output.events.extend([event(*b"ab"), event(*b"c"), event(*b"d")])
    piece = output.take()
    assert piece is not None
    assert (piece.text, piece.tokens, piece.finish) == ("abcd", tuple(b"abcd"), None)
    assert output.take() is None
    assert output.output_tokens == 4


def test_half_a_character_waits_for_its_other_half() -> None:
    output = Output(ByteTokenizer(), 1, (), False)
    first, second = "ä".encode()
    output.events.append(event(first))
    piece = output.take()
    assert piece is not None and (piece.text, piece.tokens) == ("", (first,))
    output.events.append(event(second, finished="length"))
    piece = output.take()
    assert piece is not None and (piece.text, piece.finish) == ("ä", "length")


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it() -> None:
    output = Output(ByteTokenizer(), 1, ("cd",), False)
    output.events.append(event(*b"abcde", finished="length"))
    piece = output.take()
    assert piece is not None
    assert (piece.text, piece.tokens, piece.finish) == ("ab", tuple(b"abcd"), "stop")
    assert output.stopped_here
    assert not output.has_news
