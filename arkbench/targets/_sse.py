"""Server-sent events, byte by byte if need be (WHATWG HTML, section 9.2.6, "Interpreting an event stream")."""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"
MAX_EVENT_BYTES = 32 << 20


class SseError(Exception):
    """The stream is no event stream that can be read; the message says why."""


class SseParser:
    """Turns the bytes of an event stream into its events, however the transport splits them.

    An event that is not closed by a blank line when the stream ends is dropped, as the standard says.
    """

    __slots__ = ("_after_cr", "_rest", "_started")

    def __init__(self) -> None:
        self._rest = b""
        self._after_cr = False
        self._started = False

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """The events that these bytes complete, as (event type, "" when none was given; data).

        Events without any data line are not dispatched. Raises SseError past MAX_EVENT_BYTES without a blank line.
        """
        if not self._started:
            chunk = self._strip_bom(chunk)
        if self._after_cr or b"\r" in chunk:
            chunk = self._unify_newlines(chunk)
        blocks = (self._rest + chunk if self._rest else chunk).split(b"\n\n")
        self._rest = blocks.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise SseError(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB without an end")
        events = []
        for block in blocks:
            event = _parse_block(block)
            if event is not None:
                events.append(event)
        return events

    def _strip_bom(self, chunk: bytes) -> bytes:
        head = self._rest + chunk
        if len(head) < len(_BOM) and _BOM.startswith(head):
            self._rest = head
            return b""
        self._rest = b""
        self._started = True
        return head[3:] if head.startswith(_BOM) else head

    def _unify_newlines(self, chunk: bytes) -> bytes:
        """CRLF and CR become LF; the LF of a CRLF that the transport split was already counted as its CR."""
        if not chunk:
            return chunk
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
            if not chunk:
                return chunk
        self._after_cr = chunk.endswith(b"\r")
        return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _parse_block(block: bytes) -> tuple[str, bytes] | None:
    if block.startswith(b"data:") and b"\n" not in block:
        return "", block[6:] if block.startswith(b" ", 5) else block[5:]
    kind = ""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        name, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value.decode("utf-8", "replace")
    return (kind, b"\n".join(data)) if data else None
