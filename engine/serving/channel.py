"""Pickled messages over a socket pair between the API and the engine's process; sending never blocks."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")
_PART = 1 << 20


class ChannelClosed(Exception):
    """The other process has ended."""


class Channel:
    """One end. What the socket does not take at once waits in memory until `flush`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._out = bytearray()
        self._in = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait to be written."""
        return len(self._out)

    def send(self, message: Any) -> None:
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._out += _HEADER.pack(len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Writes what the socket takes; raises ChannelClosed."""
        try:
            while self._out:
                sent = self._sock.send(memoryview(self._out)[:_PART])
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> list[Any]:
        """The messages that are complete; raises ChannelClosed when the other end is closed and all has been read."""
        open_ = self._read()
        messages: list[Any] = []
        at = 0
        while len(self._in) >= at + _HEADER.size:
            (length,) = _HEADER.unpack_from(self._in, at)
            start = at + _HEADER.size
            if len(self._in) < start + length:
                break
            messages.append(pickle.loads(memoryview(self._in)[start : start + length]))
            at = start + length
        del self._in[:at]
        if not open_ and not messages:
            raise ChannelClosed("the other process has ended")
        return messages

    def _read(self) -> bool:
        try:
            while data := self._sock.recv(_PART):
                self._in += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def close(self) -> None:
        self._sock.close()
