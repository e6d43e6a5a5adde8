"""One call in flight: its prompts are with the engine, its pieces go to the client as they come."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from functools import partial
from typing import Any

from engine.request import Request
from engine.serving.link import EngineLink
from engine.serving.metrics import Metrics
from engine.serving.output import Output, Piece, usage
from engine.serving.render import DONE, ChatRender, CompletionRender, event
from engine.serving.requests import ApiError, Call
from engine.serving.worker import WireEvent
from engine.tokens import Tokenizer

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_JSON_HEADERS = [(b"content-type", b"application/json")]


class ClientGone(Exception):
    """The client has closed its connection."""


class Generation:
    """An ASGI response. Whatever happens, its requests have left the engine when it returns."""

    def __init__(
        self, call: Call, link: EngineLink, tokenizer: Tokenizer, metrics: Metrics, model: str, first_token_s: float
    ) -> None:
        self.call = call
        self._link = link
        self._metrics = metrics
        self._first_token_s = first_token_s
        self._started = time.monotonic()
        self._last_event_s: dict[int, float] = {}
        self._signal = asyncio.Event()
        self._gone = False
        self._render = (ChatRender if call.kind == "chat" else CompletionRender)(model, call.token_ids)
        logprobs = call.sampling.logprobs is not None
        self.outputs = [Output(tokenizer, len(p), call.stops, logprobs) for p in call.prompts]
        self._ids = [uuid.uuid4().hex for _ in call.prompts]

    @property
    def has_first_token(self) -> bool:
        return bool(self._last_event_s)

    @property
    def cache_tokens(self) -> int:
        return sum(o.prompt_tokens + o.output_tokens for o in self.outputs if o.finish is None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        outcome = "error"
        try:
            self._submit()
            await self._wait_for_first_token()
            await (self._stream(send) if self.call.stream else self._whole(send))
            outcome = "ok" if all(o.error is None for o in self.outputs) else "error"
        except ApiError as error:
            outcome = "timeout" if error.status == 504 else "error"
            await _send_json(send, error.status, event(error.body())[6:-2])
        except ClientGone:
            outcome = "cancelled"
        finally:
            watcher.cancel()
            for request_id in self._ids:
                self._link.cancel(request_id)
            self._count(outcome)

    async def _watch(self, receive: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while (await receive())["type"] != "http.disconnect":
                pass
            self._gone = True
            self._signal.set()

    def _submit(self) -> None:
        if self._link.dead is not None:
            raise ApiError(500, self._link.dead, "server_error")
        for index, (request_id, prompt) in enumerate(zip(self._ids, self.call.prompts, strict=True)):
            self._link.add(Request(request_id, prompt, self.call.sampling), partial(self._on_event, index))

    def _on_event(self, index: int, event: WireEvent) -> None:
        self.outputs[index].events.append(event)
        self._signal.set()
        if not event.tokens:
            return
        last = self._last_event_s.get(index)
        if last is None:
            self._metrics.ttft.observe(event.time_s - self._started)
        else:
            self._metrics.itl.observe((event.time_s - last) / len(event.tokens))
        self._last_event_s[index] = event.time_s

    async def _wait_for_first_token(self) -> None:
        """Until an answer has begun: so that everything that fails before can still be said in a status."""
        deadline = self._started + self._first_token_s
        while not any(o.events for o in self.outputs):
            left = deadline - time.monotonic()
            if left <= 0:
                raise ApiError(504, f"no first token within {self._first_token_s:g} s", "timeout_error")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news(), left)
        for output in self.outputs:
            first = output.events[0] if output.events else None
            if first is not None and first.finished in ("error", "rejected"):
                status, kind = (400, "invalid_request_error") if first.finished == "rejected" else (500, "server_error")
                raise ApiError(status, first.error or "the engine gave up on the request", kind)

    async def _news(self) -> None:
        await self._signal.wait()
        self._signal.clear()
        if self._gone:
            raise ClientGone

    def _take(self) -> list[tuple[int, Output, Piece]]:
        taken = []
        for index, output in enumerate(self.outputs):
            if output.has_news and (piece := output.take()) is not None:
                taken.append((index, output, piece))
                if output.stopped_here:
                    self._link.cancel(self._ids[index])
        return taken

    async def _stream(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        opening = b"".join(self._render.opening(index) for index in range(len(self.outputs)))
        if opening:
            await _send_part(send, opening)
        while any(o.finish is None for o in self.outputs):
            if not any(o.has_news for o in self.outputs):
                await self._news()
            for index, output, piece in self._take():
                if output.error is not None:
                    await self._send_error(send, output.error)
                    return
                running = usage([output]) if self.call.running_usage else None
                await _send_part(send, self._render.piece(index, piece, running))
                if self._gone:
                    raise ClientGone
        tail = self._render.usage_event(self.outputs) if self.call.include_usage else b""
        await _send_part(send, tail + DONE, last=True)

    async def _send_error(self, send: Any, message: str) -> None:
        body = ApiError(500, message, "server_error").body()
        await _send_part(send, event(body) + DONE, last=True)

    async def _whole(self, send: Any) -> None:
        parts: list[list[Piece]] = [[] for _ in self.outputs]
        while any(o.finish is None for o in self.outputs):
            if not any(o.has_news for o in self.outputs):
                await self._news()
            for index, output, piece in self._take():
                if output.error is not None:
                    raise ApiError(500, output.error, "server_error")
                parts[index].append(piece)
        await _send_json(send, 200, self._render.whole(self.outputs, [_joined(p) for p in parts]))

    def _count(self, outcome: str) -> None:
        metrics = self._metrics
        metrics.requests.labels(outcome).inc(len(self.outputs))
        metrics.output_tokens.inc(sum(o.output_tokens for o in self.outputs))
        if self.has_first_token:
            metrics.prompt_tokens.inc(sum(o.prompt_tokens for o in self.outputs))
            metrics.cached_tokens.inc(sum(o.cached_tokens for o in self.outputs))


def _joined(pieces: list[Piece]) -> Piece:
    """All pieces of an answer as one."""
    text = "".join(p.text for p in pieces)
    tokens = tuple(t for p in pieces for t in p.tokens)
    logprobs = None if pieces[0].logprobs is None else tuple(e for p in pieces for e in p.logprobs or ())
    return Piece(text, tokens, logprobs, pieces[-1].finish)


async def _send_part(send: Any, body: bytes, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not last})


async def _send_json(send: Any, status: int, body: bytes) -> None:
    headers = [*_JSON_HEADERS, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
