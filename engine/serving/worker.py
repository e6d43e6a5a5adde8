"""The engine's own process: steps the engine, and between two steps talks to the API.

Nothing here waits for the API: events that its socket does not take are kept and go out later as one message, so a
slow API makes larger pieces and never a slower step.
"""

from __future__ import annotations

import importlib
import pickle
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.config import EngineConfig, EngineError
from engine.request import EngineInfo, Request, TokenEvent
from engine.serving.channel import Channel, ChannelClosed


class WireEvent(NamedTuple):
    """A TokenEvent between the processes. `finished` may also be "rejected": the engine never took the request."""

    request_id: str
    tokens: tuple[int, ...]
    time_s: float
    finished: str | None
    cached_tokens: int
    logprobs: tuple | None
    error: str | None


@dataclass(frozen=True)
class Ready:
    """What the API must know of an engine. `tokenizer`: pickled, unpickled only where text is made; None: has none."""

    info: EngineInfo
    vocab: int
    max_model_len: int
    tokenizer: bytes | None


@dataclass(frozen=True)
class Batch:
    """Events since the last batch, and how many pages of the cache are taken."""

    events: list[WireEvent]
    pages_used: int


@dataclass(frozen=True)
class Failed:
    """The engine could not start. `mistake`: the user's, the message is the mend."""

    message: str
    mistake: bool


def load_engine(config: EngineConfig, factory: str) -> Any:
    """The engine that `factory` ("module:attribute" or "module:Class.method") makes of a configuration."""
    module, _, path = factory.partition(":")
    target: Any = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    return target(config)


def _ready(engine: Any, config: EngineConfig) -> Ready:
    tokenizer = None if engine.tokenizer is None else pickle.dumps(engine.tokenizer)
    return Ready(engine.info, engine.model.vocab, config.max_model_len, tokenizer)


def _wire(event: TokenEvent) -> WireEvent:
    return WireEvent(
        event.request_id,
        event.tokens,
        event.time_s,
        event.finished,
        event.cached_tokens,
        event.logprobs,
        event.error,
    )


def _add(engine: Any, request: Request) -> list[WireEvent]:
    try:
        engine.add(request)
    except (EngineError, ValueError) as error:
        return [WireEvent(request.id, (), 0.0, "rejected", 0, None, str(error))]
    return []


def run(channel: Channel, engine: Any) -> None:
    """Steps until the API closes its end (ChannelClosed)."""
    pending: list[WireEvent] = []
    while True:
        if not engine.has_work() and not pending:
            select.select([channel], [channel] if channel.unsent else [], [])
        for kind, value in channel.receive():
            if kind == "add":
                pending += _add(engine, value)
            else:
                engine.cancel(value)
        if engine.has_work():
            pending += map(_wire, engine.step())
        channel.flush()
        if pending and not channel.unsent:
            channel.send(Batch(pending, engine.pool.capacity - engine.pool.free))
            pending = []
        elif pending and not engine.has_work():
            select.select([channel], [channel], [])


def _run_until_failure(channel: Channel, engine: Any) -> None:
    """Serves; when the engine fails, every request gets its error before this process ends with exit code 1."""
    try:
        run(channel, engine)
    except EngineError as error:
        print(f"arkbench serve: {error}", file=sys.stderr, flush=True)
        events = [WireEvent(name, (), 0.0, "error", 0, None, str(error)) for name in engine.requests()]
        channel.send(Batch(events, engine.pool.capacity - engine.pool.free))
        while channel.unsent:
            select.select([], [channel], [])
            channel.flush()
        engine.close()
        sys.exit(1)


def main(fd: int) -> None:
    """Loads the engine that the first message names and serves it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fd))
    try:
        select.select([channel], [], [])
        ((config, factory),) = channel.receive()
        engine = _start(channel, config, factory)
        if engine is not None:
            _run_until_failure(channel, engine)
    except ChannelClosed:
        return
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def _start(channel: Channel, config: EngineConfig, factory: str) -> Any | None:
    try:
        engine = load_engine(config, factory)
        channel.send(_ready(engine, config))
        return engine
    except EngineError as error:
        channel.send(Failed(str(error), True))
    except ChannelClosed:
        raise
    except Exception as error:
        traceback.print_exc()
        channel.send(Failed(f"the engine did not start: {type(error).__name__}: {error}", False))
    return None
