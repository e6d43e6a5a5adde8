"""Pickled messages over a socket pair between the harness and its client processes; sending never blocks."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_HEADER = struct.Struct("!Q")
_READ = 1 << 20


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end. `send` queues and writes what fits; `flush` writes more; `receive` returns what has arrived."""

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
        self._out += _HEADER.pack(len(payload))
        self._out += payload
        self.flush()

    def flush(self) -> None:
        """Writes what the socket takes; raises ChannelClosed."""
        try:
            while self._out:
                sent = self._sock.send(memoryview(self._out)[:_READ])
                del self._out[:sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> list[Any]:
        """Every complete message that is there; raises ChannelClosed once the other side has closed and all is read."""
        closed = False
        try:
            while True:
                data = self._sock.recv(_READ)
                if not data:
                    closed = True
                    break
                self._in += data
        except BlockingIOError:
            pass
        except OSError:
            closed = True
        messages = []
        at = 0
        while len(self._in) - at >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._in, at)
            if len(self._in) - at - _HEADER.size < length:
                break
            start = at + _HEADER.size
            messages.append(pickle.loads(memoryview(self._in)[start : start + length]))
            at = start + length
        del self._in[:at]
        if closed and not messages:
            raise ChannelClosed("the other process has ended")
        return messages

    def close(self) -> None:
        self._sock.close()
