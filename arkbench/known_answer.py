"""A server with known answers: it streams on an exact schedule, or fails in an exact way.

The client is tested against it, and `arkbench doctor` measures with it what this machine's client can drive. A
`Script` is what goes over the wire and when; `answer`, `refusal` and `event` write the common ones.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import resource
import signal
import subprocess
import sys
import threading
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

Ending = Literal["end", "hang", "cut"]
_EVENTS = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class Step:
    """Bytes of the body that are written `at_s` seconds after the request was read."""

    at_s: float
    data: bytes


@dataclass(frozen=True)
class Script:
    """One response. `split`: the body is written in transport chunks of so many bytes; None: one chunk a step.

    `ending`: "end" closes the body properly, "hang" leaves it open, "cut" resets the connection. Not `chunked`: the
    body ends with the connection. `head_at_s`: when status and headers are sent (None: with the first step).
    """

    steps: tuple[Step, ...] = ()
    status: int = 200
    content_type: str = _EVENTS
    ending: Ending = "end"
    split: int | None = None
    chunked: bool = True
    head_at_s: float | None = None


Plan = Callable[[dict[str, Any]], Script]


def event(value: Any, newline: str = "\n", space: bool = True) -> bytes:
    """One event of the stream; `value` is JSON, or text that goes out as it is ("[DONE]")."""
    data = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"data:{' ' if space else ''}{data}{newline}{newline}".encode()


def text_piece(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A piece of a text completion."""
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def chat_piece(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """A piece of a chat completion."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"object": "chat.completion.chunk", "choices": [choice]}


def usage_piece(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    """The last piece: usage, no choices."""
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return {"object": "text_completion", "choices": [], "usage": usage}


@lru_cache(maxsize=256)
def _token_steps(first_s: float, gap_s: float, tokens: int, per_piece: int, first_piece: int) -> tuple[Step, ...]:
    steps = []
    left, at = tokens, first_s
    while left > 0:
        count = min(left, first_piece if not steps else per_piece)
        left -= count
        steps.append(Step(at, event(text_piece(" tok" * count, "length" if not left else None))))
        at += gap_s
    return tuple(steps)


def answer(
    prompt_tokens: int,
    tokens: int,
    first_s: float = 0.0,
    gap_s: float = 0.0,
    per_piece: int = 1,
    first_piece: int | None = None,
    role_s: float | None = None,
    usage: bool = True,
) -> Script:
    """A text completion: first piece after `first_s`, then one of `per_piece` tokens every `gap_s`; usage; [DONE].

    `role_s`: a piece without text at that time, before any token.
    """
    steps = _token_steps(first_s, gap_s, tokens, per_piece, first_piece or per_piece)
    last = steps[-1].at_s if steps else first_s
    role = (Step(role_s, event(text_piece(""))),) if role_s is not None else ()
    tail = (event(usage_piece(prompt_tokens, tokens, 0)) if usage else b"") + event("[DONE]")
    return Script((*role, *steps, Step(last, tail)))


def refusal(status: int, message: str, at_s: float = 0.0) -> Script:
    """An answer with an error status and a JSON body."""
    body = json.dumps({"error": {"message": message, "type": "error", "code": status}}).encode()
    return Script((Step(at_s, body),), status=status, content_type="application/json")


def constant(**schedule: Any) -> Plan:
    """Every request gets the same schedule (the arguments of `answer`), as many tokens as it asks for."""
    return lambda body: answer(body["prompt_tokens"], int(body.get("max_tokens") or 16), **schedule)


_IDS = re.compile(rb'"prompt"\s*:\s*\[([\d\s,]*)\]')


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON body with `prompt_tokens` added: ids, or words of text. Long id lists are counted, not parsed."""
    ids = _IDS.search(raw)
    count = None
    if ids is not None and len(raw) > 32_768:
        count = raw.count(b",", ids.start(1), ids.end(1)) + 1
        raw = raw[: ids.start(1)] + raw[ids.end(1) :]
    body = json.loads(raw)
    if count is None:
        prompt = body.get("prompt", "")
        if "messages" in body:
            prompt = " ".join(str(m.get("content", "")) for m in body["messages"])
        count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    body["prompt_tokens"] = count
    return body


class _Peer(asyncio.Protocol):
    """One connection: reads a request, plays its script, reads the next."""

    def __init__(self, server: KnownAnswerServer) -> None:
        self._server = server
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted = -1
        self._playing = False
        self.transport: asyncio.Transport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._server.peers.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.peers.discard(self)
        if self._playing:
            self._server.lost += 1
            self._server.finished()
        self._playing = False

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._wanted < 0:
            joined = b"".join(self._parts)
            self._parts = [joined]
            end = joined.find(b"\r\n\r\n")
            if end < 0:
                return
            length = re.search(rb"content-length:\s*(\d+)", joined[:end], re.IGNORECASE)
            self._wanted = end + 4 + (int(length[1]) if length else 0)
        if self._size >= self._wanted:
            raw = b"".join(self._parts)
            request, rest = raw[: self._wanted], raw[self._wanted :]
            self._parts, self._size, self._wanted = [rest], len(rest), -1
            self._request(request)

    def _request(self, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        if head.startswith(b"GET"):
            self._json(self._server.lateness() if b" /lateness" in head[:40] else _MODELS)
            return
        parsed = read_body(body)
        self._server.requests.append(parsed)
        self._playing = True
        self._server.play(partial(self._play, self._server.plan(parsed)))

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def _play(self, script: Script) -> None:
        start = self._server.loop.time()
        if script.head_at_s is not None:
            self._server.loop.call_at(start + script.head_at_s, self._write, script, b"", True)
        self._step(script, start, 0)

    def _step(self, script: Script, start: float, index: int) -> None:
        """Writes every step that is due and comes back for the next."""
        loop = self._server.loop
        steps = script.steps
        while index < len(steps):
            due = start + steps[index].at_s
            late = loop.time() - due
            if late < 0:
                loop.call_at(due, self._step, script, start, index)
                return
            if not self._playing:
                return
            self._server.lateness_s.append(late)
            self._write(script, steps[index].data, index == 0 and script.head_at_s is None)
            index += 1
        self._end(script, not steps and script.head_at_s is None)

    def _write(self, script: Script, data: bytes, with_head: bool) -> None:
        head = _head(script) if with_head else b""
        if script.split is None:
            self.transport.write(head + _framed(script, data))
            return
        for at in range(0, len(data), script.split):
            self.transport.write(head + _framed(script, data[at : at + script.split]))
            head = b""

    def _end(self, script: Script, with_head: bool) -> None:
        if not self._playing:
            return
        if with_head:
            self.transport.write(_head(script))
        if script.ending == "hang":
            return
        self._playing = False
        self._server.finished()
        if script.ending == "cut":
            self.transport.abort()
        elif script.chunked:
            self.transport.write(b"0\r\n\r\n")
        else:
            self.transport.close()


_MODELS = {"object": "list", "data": [{"id": "known-answer", "object": "model"}]}


@lru_cache(maxsize=64)
def _status_head(status: int, content_type: str, chunked: bool) -> bytes:
    framing = "Transfer-Encoding: chunked" if chunked else "Connection: close"
    return f"HTTP/1.1 {status} Known\r\nContent-Type: {content_type}\r\n{framing}\r\n\r\n".encode()


def _head(script: Script) -> bytes:
    return _status_head(script.status, script.content_type, script.chunked)


def _framed(script: Script, data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if script.chunked and data else data


class KnownAnswerServer:
    """Serves `plan` on 127.0.0.1 from a thread of its own, between __enter__ and __exit__.

    `at_once`: how many requests it works on; more wait their turn (their script starts late). `requests`: every body
    it has read. `lost`: connections that the client closed in the middle of an answer.
    """

    def __init__(self, plan: Plan, port: int = 0, at_once: int | None = None) -> None:
        self.plan = plan
        self.port = port
        self.requests: list[dict[str, Any]] = []
        self.peers: set[_Peer] = set()
        self.lost = 0
        self.lateness_s = array("d")
        self.loop = asyncio.new_event_loop()
        self._at_once = at_once
        self._active = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def play(self, start: Callable[[], None]) -> None:
        if self._at_once is not None and self._active >= self._at_once:
            self._queue.append(start)
            return
        self._active += 1
        start()

    def finished(self) -> None:
        self._active -= 1
        if self._queue:
            self._active += 1
            self._queue.popleft()()

    def lateness(self) -> dict[str, float]:
        """How late its own writes were, in seconds."""
        ordered = sorted(self.lateness_s) or [0.0]
        at = {name: ordered[int(q * (len(ordered) - 1))] for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
        return {**at, "writes": len(self.lateness_s)}

    def listen(self) -> None:
        """Binds the port; the loop must be run by the caller."""
        start = self.loop.create_server(lambda: _Peer(self), "127.0.0.1", self.port, backlog=4096)
        self._server = self.loop.run_until_complete(start)
        self.port = self._server.sockets[0].getsockname()[1]

    def __enter__(self) -> KnownAnswerServer:
        self.listen()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.loop.call_soon_threadsafe(self._stop)
        self._thread.join()
        self.loop.close()

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for peer in list(self.peers):
            peer.transport.abort()
        self.loop.call_soon(self.loop.stop)


class KnownAnswerProcess:
    """The server in a process of its own, with one schedule for every request (the arguments of `answer`)."""

    def __init__(self, **schedule: float) -> None:
        command = [sys.executable, "-m", "arkbench.known_answer", json.dumps(schedule)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = (self._process.stdout.readline() if self._process.stdout else "").strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> KnownAnswerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()


def main() -> None:
    """python -m arkbench.known_answer '{"first_s": 0.2, "gap_s": 0.02}': prints its URL and serves until SIGTERM."""
    parser = argparse.ArgumentParser(description="a server with known answers")
    parser.add_argument("schedule", type=json.loads, help="the arguments of known_answer.answer, as JSON")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    server = KnownAnswerServer(constant(**options.schedule), options.port)
    # What is kept of each request would grow without bound here, and nobody reads it.
    server.requests = deque(maxlen=1)  # type: ignore[assignment]
    server.listen()
    print(server.url, flush=True)
    gc.freeze()
    gc.disable()
    server.loop.add_signal_handler(signal.SIGTERM, server.loop.stop)
    server.loop.run_forever()


if __name__ == "__main__":
    main()
