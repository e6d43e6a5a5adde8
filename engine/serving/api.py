"""The routes: models, completions, chat completions, health, metrics; limits and errors in OpenAI's form."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.serving.generation import Generation
from engine.serving.link import EngineLink
from engine.serving.metrics import Metrics
from engine.serving.requests import ApiError, Limits, parse_chat, parse_completion
from engine.serving.worker import Ready
from engine.tokens import Tokenizer


@dataclass(frozen=True)
class ApiConfig:
    """What the API promises: the model's name, its limits, the key that clients need (None: none)."""

    model: str
    api_key: str | None
    max_concurrent: int
    first_token_timeout_s: float
    max_body_bytes: int
    switches: dict[str, str]


class Api:
    """The handlers. `draining`: no new requests, the server is going down."""

    def __init__(self, config: ApiConfig, link: EngineLink, ready: Ready, tokenizer: Tokenizer) -> None:
        self._config = config
        self._link = link
        self._ready = ready
        self._tokenizer = tokenizer
        self._limits = Limits(ready.vocab, ready.max_model_len, config.max_concurrent)
        self._metrics = Metrics()
        self._metrics.cache_room.set(ready.info.cache_tokens)
        self._running: set[Generation] = set()
        self._created = int(time.time())
        self.draining = False

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _fault}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def health(self, request: Request) -> Response:
        if self._link.dead is not None:
            return JSONResponse({"status": "dead", "reason": self._link.dead}, 500)
        return JSONResponse({"status": "draining" if self.draining else "ok"}, 503 if self.draining else 200)

    async def metrics(self, request: Request) -> Response:
        started = sum(g.has_first_token for g in self._running)
        self._metrics.running.set(started)
        self._metrics.waiting.set(len(self._running) - started)
        self._metrics.cache_tokens.set(sum(g.cache_tokens for g in self._running))
        self._metrics.pages.set(self._link.pages_used)
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._authorize(request)
        name = request.path_params["name"]
        if name != self._config.model:
            raise ApiError(404, f"model '{name}' is not served here, '{self._config.model}' is", "not_found_error")
        return JSONResponse(self._card())

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse_chat)

    async def _generate(self, request: Request, parse: Any) -> Any:
        self._authorize(request)
        if self.draining:
            raise ApiError(503, "the server is going down", "server_error")
        config = self._config
        call = parse(await self._body(request), config.model, self._tokenizer, self._limits)
        in_flight = sum(len(g.outputs) for g in self._running)
        if in_flight + len(call.prompts) > config.max_concurrent:
            self._metrics.requests.labels("refused").inc(len(call.prompts))
            raise ApiError(
                429, f"{in_flight} requests are in flight, the limit is {config.max_concurrent}", "rate_limit_error"
            )
        generation = Generation(
            call, self._link, self._tokenizer, self._metrics, config.model, config.first_token_timeout_s
        )
        self._running.add(generation)
        return _Tracked(generation, self._running)

    async def _body(self, request: Request) -> bytes:
        limit = self._config.max_body_bytes
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise ApiError(413, f"the body is larger than the limit of {limit} bytes")
                parts.append(part)
        except ClientDisconnect:
            raise ApiError(499, "the client went away") from None
        return b"".join(parts)

    def _authorize(self, request: Request) -> None:
        key = self._config.api_key
        given = request.headers.get("authorization", "")
        if key is not None and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", "authentication_error")

    def _card(self) -> dict[str, Any]:
        info = self._ready.info
        meta = {
            "n_vocab": self._ready.vocab,
            "n_ctx": self._ready.max_model_len,
            "device": info.device,
            "step_weight_bytes": info.step_weight_bytes,
            "cache_bytes_per_token": info.cache_bytes_per_token,
            "state_bytes_per_request": info.state_bytes_per_request,
            "cache_tokens": info.cache_tokens,
            "start_seconds": info.start_seconds,
            "switches": self._config.switches,
        }
        return {
            "id": self._config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "arkbench",
            "max_model_len": self._ready.max_model_len,
            "meta": meta,
        }


class _Tracked:
    """A generation that leaves the set of those in flight when it is over."""

    def __init__(self, generation: Generation, running: set[Generation]) -> None:
        self._generation = generation
        self._running = running

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._generation(scope, receive, send)
        finally:
            self._running.discard(self._generation)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _fault(request: Request, error: Exception) -> Response:
    message = f"a fault of the server: {type(error).__name__} (its log has the traceback)"
    return JSONResponse(ApiError(500, message, "server_error").body(), 500)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).body(), error.status_code, headers=error.headers)
