"""The API's side of the engine process: starts it, sends requests, hands events to whoever waits for them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig, EngineError
from engine.request import Request
from engine.serving.channel import Channel, ChannelClosed
from engine.serving.worker import Batch, Failed, Ready, WireEvent

Handler = Callable[[WireEvent], None]


class EngineLink:
    """One engine process. `start` blocks until the engine is ready; `attach` joins it to the running event loop."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_death: Callable[[str], None] = lambda message: None
        self._writing = False
        self.dead: str | None = None
        self.pages_used = 0

    def start(self, config: EngineConfig, factory: str) -> Ready:
        """Raises EngineError for the user's mistakes and RuntimeError when the process fails."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        code = f"from engine.serving.worker import main; main({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._channel = Channel(ours)
        self._channel.send((config, factory))
        try:
            messages: list[Ready | Failed] = []
            while not messages:
                select.select([self._channel], [], [])
                messages = self._channel.receive()
        except ChannelClosed:
            message = f"the engine's process ended at its start ({self._exit()})"
            if self.process.returncode == -signal.SIGKILL:
                message += "; where the memory ran out, give fewer --cache-tokens"
            raise RuntimeError(message) from None
        if isinstance(messages[0], Failed):
            self.process.wait()
            raise (EngineError if messages[0].mistake else RuntimeError)(messages[0].message)
        return messages[0]

    def attach(self, on_death: Callable[[str], None]) -> None:
        """From now on events reach their handlers on the running loop; `on_death` hears once of the engine's end."""
        self._loop = asyncio.get_running_loop()
        self._on_death = on_death
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def add(self, request: Request, handler: Handler) -> None:
        """Sends a request; `handler` gets its events until the one with `finished`, or until `cancel`."""
        self._handlers[request.id] = handler
        self._send(("add", request))

    def cancel(self, request_id: str) -> None:
        """Forgets a request and tells the engine; harmless when it has already finished."""
        if self._handlers.pop(request_id, None) is not None and self.dead is None:
            self._send(("cancel", request_id))

    def close(self) -> None:
        """Ends the engine's process: it leaves when its socket closes."""
        if self._loop is not None and self.dead is None:
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _send(self, message: tuple) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._died()
            return
        self._write_on()

    def _write_on(self) -> None:
        if self._channel.unsent and not self._writing:
            self._writing = True
            self._loop.add_writer(self._channel.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            self._channel.flush()
        except ChannelClosed:
            self._died()
            return
        if not self._channel.unsent:
            self._writing = False
            self._loop.remove_writer(self._channel.fileno())

    def _readable(self) -> None:
        try:
            batches: list[Batch] = self._channel.receive()
        except ChannelClosed:
            self._died()
            return
        for batch in batches:
            self.pages_used = batch.pages_used
            for event in batch.events:
                handler = self._handlers.get(event.request_id)
                if handler is None:
                    continue
                if event.finished:
                    del self._handlers[event.request_id]
                handler(event)

    def _died(self) -> None:
        if self.dead is not None:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self.dead = f"the engine's process ended unexpectedly ({self._exit()})"
        handlers, self._handlers = self._handlers, {}
        for request_id, handler in handlers.items():
            handler(WireEvent(request_id, (), 0.0, "error", 0, None, self.dead))
        self._on_death(self.dead)

    def _exit(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "no exit code"
        return f"signal {-code}" if code < 0 else f"exit code {code}"
