"""An engine without a model: the same API, answers that a test can foretell.

The answer to a prompt counts on from its last token, modulo the vocabulary (plus the seed, when it is sampled).
What else it does, the first token of the prompt says.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.config import EngineConfig, EngineError
from engine.request import EngineInfo, Request, TokenEvent

SILENT, DIES, FAILS, KILLED, SLOW = 900, 901, 902, 903, 904
EOS = 999
STEP_S = 0.001


class ByteTokenizer:
    """One token a byte of UTF-8."""

    eos_token_ids = (EOS,)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special: bool = True) -> str:
        return bytes(t for t in tokens if t < 256).decode("utf-8", "replace")

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


@dataclass
class _Live:
    request: Request
    made: list[int] = field(default_factory=list)


class ScriptedEngine:
    def __init__(self, config: EngineConfig) -> None:
        if config.model == "unknown":
            raise EngineError("unknown model 'unknown': take another")
        if config.model == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.model == "broken":
            raise ZeroDivisionError("by zero")
        self.config = config
        self.tokenizer = ByteTokenizer() if config.model == "bytes" else None
        self.model = SimpleNamespace(vocab=1000, eos_token_ids=(EOS,))
        self.pool = SimpleNamespace(capacity=100, free=100)
        self.info = EngineInfo(config.model, "fake", 1, 2, 3, 4, 5000, "nothing", {"weights": 0.5})
        self._live: dict[str, _Live] = {}
        self._events: list[TokenEvent] = []

    def add(self, request: Request) -> None:
        if request.prompt[0] == FAILS and len(request.prompt) == 2:
            raise EngineError("this prompt can never run")
        self._live[request.id] = _Live(request)

    def cancel(self, request_id: str) -> None:
        if self._live.pop(request_id, None) is not None:
            self._events.append(TokenEvent(request_id, (), time.monotonic(), "cancelled"))

    def has_work(self) -> bool:
        return bool(self._live or self._events)

    def step(self) -> list[TokenEvent]:
        time.sleep(STEP_S)
        events, self._events = self._events, []
        for live in list(self._live.values()):
            event = self._advance(live)
            if event is not None:
                events.append(event)
                if event.finished:
                    del self._live[live.request.id]
        self.pool.free = self.pool.capacity - len(self._live)
        return events

    def _advance(self, live: _Live) -> TokenEvent | None:
        request, made = live.request, live.made
        first = request.prompt[0]
        if first == SILENT:
            return None
        if first == DIES and made:
            raise RuntimeError("the device is lost")
        if first == KILLED and made:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == FAILS and made:
            return TokenEvent(request.id, (), time.monotonic(), "error", error="the request is lost")
        if first == SLOW:
            time.sleep(0.05)
        sampling = request.sampling
        seed = (sampling.seed or 0) if sampling.temperature > 0 else 0
        token = (request.prompt[-1] + 1 + len(made) + seed) % self.model.vocab
        made.append(token)
        stop = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        finished = "stop" if stop and len(made) > sampling.min_tokens else None
        if len(made) == sampling.max_tokens:
            finished = finished or "length"
        logprobs = None if sampling.logprobs is None else ((-0.5, {token: -0.5, (token + 1) % 1000: -1.5}),)
        cached = 2 if len(made) == 1 and first == 7 else 0
        return TokenEvent(request.id, (token,), time.monotonic(), finished, cached, logprobs)
