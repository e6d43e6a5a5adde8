"""The response parser against h11, and against what broken servers send."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.targets._http1 import HttpError, ResponseParser


def parse(stream: bytes, size: int = 1 << 20, closed: bool = False) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    body = b"".join(p for i in range(0, len(stream), size) for p in parser.feed(stream[i : i + size]))
    if closed:
        parser.end_of_stream()
    return parser, body


def chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n" + trailer + b"\r\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunks_split_anywhere(size: int) -> None:
    parser, body = parse(HEAD + chunked(b"data: a\n\n", b"x" * 300), size)
    assert (parser.status, body, parser.complete, parser.keep_alive) == (200, b"data: a\n\n" + b"x" * 300, True, True)
    assert parser.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_extensions_trailers_and_upper_case_sizes(size: int) -> None:
    stream = HEAD + b"A;name=value\r\n0123456789\r\n0a \r\n0123456789\r\n000\r\nX-Trailer: 1\r\n\r\n"
    parser, body = parse(stream, size)
    assert (body, parser.complete, parser.keep_alive) == (b"0123456789" * 2, True, True)


@pytest.mark.parametrize("size", [1, 1000])
def test_length(size: int) -> None:
    parser, body = parse(b"HTTP/1.1 429 Too Many\r\ncontent-LENGTH: 5 \r\n\r\nhello", size)
    assert (parser.status, body, parser.complete, parser.keep_alive) == (429, b"hello", True, True)


def test_body_until_close() -> None:
    stream = b"HTTP/1.1 200 OK\r\n\r\ndata"
    assert not parse(stream)[0].complete
    parser, body = parse(stream, closed=True)
    assert (body, parser.complete, parser.keep_alive) == (b"data", True, False)


def test_a_chunked_body_that_is_cut_is_not_complete() -> None:
    assert not parse((HEAD + chunked(b"abc"))[:-2], closed=True)[0].complete


def test_interim_responses_are_skipped() -> None:
    parser, body = parse(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 3)
    assert (parser.status, body) == (200, b"ok")


@pytest.mark.parametrize(
    ("head", "alive"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
    ],
)
def test_connection_reuse(head: bytes, alive: bool) -> None:
    parser, _ = parse(head)
    assert (parser.complete, parser.keep_alive) == (True, alive)


@pytest.mark.parametrize(
    "stream",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\x15\x03\x01\x00\x02",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbroken\r\n\r\n",
        HEAD + b"5_0\r\n",
        HEAD + b"-1\r\n",
        HEAD + b"\r\n",
        HEAD + b"3\r\nabcd\r\n",
        HEAD + b"z" * 10_000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
    ],
)
def test_what_is_no_http_is_refused(stream: bytes) -> None:
    with pytest.raises(HttpError):
        parse(stream)


def by_h11(stream: bytes) -> tuple[int, bytes, bool]:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("content-length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(stream)
    status, body, complete = 0, b"", False
    while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            complete = True
            break
    return status, body, complete


@given(
    status=st.sampled_from([200, 400, 429, 503]),
    parts=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    trailer=st.sampled_from([b"", b"A: b\r\n", b"A: b\r\nC: d\r\n"]),
    lose=st.integers(0, 30),
    size=st.integers(1, 50),
    as_length=st.booleans(),
)
def test_same_as_h11(status: int, parts: list[bytes], trailer: bytes, lose: int, size: int, as_length: bool) -> None:
    head = b"HTTP/1.1 %d X\r\n" % status
    if as_length:
        whole = head + b"Content-Length: %d\r\n\r\n" % sum(map(len, parts)) + b"".join(parts)
    else:
        whole = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(*parts, trailer=trailer)
    stream = whole[: len(whole) - lose]
    parser, body = parse(stream, size)
    assert (parser.status, body, parser.complete) == by_h11(stream)
