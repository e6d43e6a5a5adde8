"""`arkbench serve`: the engine behind an OpenAI-compatible API.

Two processes: this one speaks HTTP, the other (engine/serving/worker.py) steps the engine, so that Python's
interpreter lock never holds up a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from engine.config import EngineConfig, EngineError, Switches
from engine.serving.api import Api, ApiConfig
from engine.serving.link import EngineLink
from engine.serving.text import WordTokenizer
from engine.serving.worker import Ready
from engine.tokens import Tokenizer


@dataclass(frozen=True)
class ServerConfig:
    """How a server is started. `factory`: what makes the engine of its configuration, as "module:name.name".

    `drain_s`: how long requests in flight may take to end after SIGTERM. `max_body_bytes` bounds a request's body.
    """

    engine: EngineConfig = field(default_factory=lambda: EngineConfig("SmolLM2-135M"))
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_concurrent: int = 64
    first_token_timeout_s: float = 90.0
    max_body_bytes: int = 32 << 20
    drain_s: float = 30.0
    factory: str = "engine.engine:Engine.load"


def serve(config: ServerConfig) -> int:
    """Serves until SIGTERM or Ctrl-C, after one line on stdout when ready.

    Exit code: 0 after SIGTERM or Ctrl-C, 1 when the engine failed, 2 for a mistake of the user's (one line on stderr).
    Must be called from the main thread.
    """
    link = EngineLink()
    try:
        sock = _listen(config.host, config.port)
        with _terminated_by_signal():
            ready = link.start(config.engine, config.factory)
    except EngineError as error:
        return _complain(str(error), 2)
    except RuntimeError as error:
        return _complain(str(error), 1)
    except _Terminated:
        link.close()
        return 0
    api = Api(_api_config(config), link, ready, _tokenizer(ready))
    server = _Server(_uvicorn_config(api, config), api, link, _ready_line(config, ready, sock))
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[sock]))
    link.close()
    return _complain(link.dead, 1) if link.dead is not None else 0


class _Server(uvicorn.Server):
    """uvicorn that says when it is ready, drains on a signal without dying of it, and ends with its engine."""

    def __init__(self, config: uvicorn.Config, api: Api, link: EngineLink, ready_line: str) -> None:
        super().__init__(config)
        self._api = api
        self._link = link
        self._ready_line = ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._link.attach(lambda message: self._stop())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        await super().startup(sockets=sockets)
        print(self._ready_line, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal again after its end, and the exit code would not be 0.
        yield

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._api.draining = True


class _Terminated(BaseException):
    """SIGTERM or Ctrl-C while the engine is starting."""


@contextlib.contextmanager
def _terminated_by_signal() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Terminated

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The event loop turns Nagle's delay off only where a socket names its protocol.
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        raise EngineError(f"cannot listen on {host}:{port} ({error}): choose another --host or --port") from None
    return sock


def _api_config(config: ServerConfig) -> ApiConfig:
    return ApiConfig(
        model=config.engine.model,
        api_key=config.api_key,
        max_concurrent=config.max_concurrent,
        first_token_timeout_s=config.first_token_timeout_s,
        max_body_bytes=config.max_body_bytes,
        switches=config.engine.switches.as_dict(),
    )


def _uvicorn_config(api: Api, config: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        api.app(),
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=4096,
        timeout_keep_alive=600,
        timeout_graceful_shutdown=max(int(config.drain_s), 1),
    )


def _tokenizer(ready: Ready) -> Tokenizer:
    return WordTokenizer(ready.vocab) if ready.tokenizer is None else pickle.loads(ready.tokenizer)


def _ready_line(config: ServerConfig, ready: Ready, sock: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    seconds = sum(ready.info.start_seconds.values())
    return (
        f"ready: {config.engine.model} at http://{host}:{sock.getsockname()[1]}/v1 (engine started in {seconds:.1f} s)"
    )


def _complain(message: str, code: int) -> int:
    print(f"arkbench serve: {message}", file=sys.stderr, flush=True)
    return code


def config_from_json(text: str) -> ServerConfig:
    """A ServerConfig from its fields as JSON ("engine" and its "switches" nested)."""
    values = json.loads(text)
    engine = values.pop("engine", {})
    switches = Switches(**engine.pop("switches", {}))
    return ServerConfig(engine=EngineConfig(switches=switches, **engine), **values)


if __name__ == "__main__":
    sys.exit(serve(config_from_json(sys.argv[1])))
