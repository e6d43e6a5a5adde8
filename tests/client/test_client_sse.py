"""Server-sent events: every valid framing, wherever the transport splits it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.targets import _sse
from arkbench.targets._sse import SseError, SseParser


def parse(*chunks: bytes) -> list[tuple[str, bytes]]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [("", b"a")]),
        (b"data:a\n\n", [("", b"a")]),
        (b"data:  a\n\n", [("", b" a")]),
        (b"data: a\r\n\r\n", [("", b"a")]),
        (b"data: a\r\r", [("", b"a")]),
        (b"data: a\n\r\n", [("", b"a")]),
        (b"data: a\r\n\n", [("", b"a")]),
        (b"data: a\ndata: b\n\n", [("", b"a\nb")]),
        (b"data\n\n", [("", b"")]),
        (b"data:\n\n", [("", b"")]),
        (b": comment\n\n", []),
        (b":\n\ndata: a\n\n", [("", b"a")]),
        (b": keep-alive\ndata: a\n\n", [("", b"a")]),
        (b"event: error\ndata: a\n\n", [("error", b"a")]),
        (b"data: a\nevent:error\n\n", [("error", b"a")]),
        (b"event: error\n\ndata: a\n\n", [("", b"a")]),
        (b"id: 1\nretry: 10\ndata: a\n\n", [("", b"a")]),
        (b"nonsense: x\ndata: a\n\n", [("", b"a")]),
        (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [("", b"a"), ("", b"b")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\n", []),
        (b"data: a: b\n\n", [("", b"a: b")]),
        (b" data: a\n\n", []),
        (b"data: a\n", []),
        (b"data: a", []),
        (b"", []),
    ],
)
def test_framing(stream: bytes, events: list[tuple[str, bytes]]) -> None:
    assert parse(stream) == events
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == events


def test_carriage_return_split_from_its_line_feed() -> None:
    assert parse(b"data: a\r", b"\n\r", b"\ndata: b\r\n\r\n") == [("", b"a"), ("", b"b")]
    assert parse(b"data: a\r", b"", b"\n", b"\r", b"\n") == [("", b"a")]


def test_an_event_is_handed_out_with_the_byte_that_completes_it() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [("", b"a")]
    assert parser.feed(b"data: b\r") == []
    assert parser.feed(b"\r") == [("", b"b")]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(SseError, match="without an end"):
        parse(b"data: " + b"x" * 200)


def reference(stream: bytes) -> list[tuple[str, bytes]]:
    """The standard's own algorithm, line by line, over the whole stream at once."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, kind, data = [], "", None
    *lines, _unfinished = text.split(b"\n")
    for line in lines:
        if not line:
            if data is not None:
                events.append((kind, data[:-1]))
            kind, data = "", None
            continue
        name, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if name == b"data":
            data = (data or b"") + value + b"\n"
        elif name == b"event":
            kind = value.decode("utf-8", "replace")
    return events


lines = st.sampled_from(
    [
        b"data: a",
        b"data:b",
        b"data",
        b"data:",
        b": c",
        b"event: error",
        b"event:",
        b"id: 3",
        b"x",
        b"",
        b"",
        b"data: \xc3",
    ]
)
newlines = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(
    bom=st.sampled_from([b"", b"\xef\xbb\xbf", b"\xef\xbb"]),
    parts=st.lists(st.tuples(lines, newlines), max_size=20),
    cuts=st.lists(st.integers(0, 200), max_size=30),
)
def test_any_framing_split_anywhere(bom: bytes, parts: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    stream = bom + b"".join(line + newline for line, newline in parts)
    at = sorted({0, len(stream), *(c for c in cuts if c < len(stream))})
    chunks = [stream[a:b] for a, b in itertools.pairwise(at)]
    assert parse(*chunks) == reference(stream)


@given(st.binary(max_size=300), st.integers(1, 300))
def test_any_bytes_split_anywhere(stream: bytes, size: int) -> None:
    chunks = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert parse(*chunks) == reference(stream)
