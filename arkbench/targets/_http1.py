"""An incremental HTTP/1.1 response parser (RFC 9112), for the fast client; no I/O."""

from __future__ import annotations

_HEX = frozenset(b"0123456789abcdefABCDEF")
_MAX_HEAD = 64 << 10
_MAX_LINE = 8 << 10


class HttpError(Exception):
    """The peer does not speak HTTP/1.1; the message says what it sent."""


class ResponseParser:
    """One response. `feed` returns body bytes as they come; `status` is 0 until the head has been read.

    `complete`: the body has ended by its own framing. `keep_alive`: the connection can carry another request.
    """

    __slots__ = ("_buffer", "_mode", "_need", "complete", "headers", "keep_alive", "status")

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep_alive = False
        self._mode = "head"
        self._buffer = b""
        self._need = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The parts of the body in these bytes; raises HttpError."""
        if self._mode == "head":
            data = self._feed_head(data)
        if not data:
            return []
        if self._mode == "until-close":
            return [data]
        if self._mode == "length":
            return self._feed_length(data)
        if self.complete:
            self.keep_alive = False
            return []
        return self._feed_chunked(data)

    def end_of_stream(self) -> None:
        """The peer has closed: this ends a body that has no framing of its own."""
        self.keep_alive = False
        if self._mode == "until-close":
            self.complete = True

    def _feed_head(self, data: bytes) -> bytes:
        data = self._buffer + data
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise HttpError("a response head of more than 64 KiB")
                if not b"HTTP/1."[: len(data)] == data[:7]:
                    raise HttpError(f"not an HTTP/1.1 response: {data[:40]!r}")
                self._buffer = data
                return b""
            self._parse_head(data[:end])
            data = data[end + 4 :]
            if self.status >= 200:
                break
            self.status = 0
        self._buffer = b""
        self._choose_framing()
        return data

    def _parse_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit() and len(code) == 3):
            raise HttpError(f"not an HTTP/1.1 response: {first[:40]!r}")
        self.status = int(code)
        self.headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise HttpError(f"a header without a colon: {line[:40]!r}")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)

    def _choose_framing(self) -> None:
        length = self.headers.get("content-length")
        if self.status in (204, 304):
            self._mode, self.complete = "none", True
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._mode = "size"
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise HttpError(f"a content-length of {length[:20]!r}")
            self._mode, self._need = "length", int(length)
            self.complete = self._need == 0
        else:
            self._mode, self.keep_alive = "until-close", False

    def _feed_length(self, data: bytes) -> list[bytes]:
        body = data[: self._need]
        self._need -= len(body)
        self.complete = self._need == 0
        if len(body) < len(data):
            self.keep_alive = False
        return [body] if body else []

    def _feed_chunked(self, data: bytes) -> list[bytes]:
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        parts: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self._mode == "payload":
                part = data[at : at + self._need]
                parts.append(part)
                at += len(part)
                self._need -= len(part)
                if self._need == 0:
                    self._mode = "payload-end"
                continue
            if self._mode == "done":
                self.keep_alive = False
                break
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                self._keep_partial_line(data[at:])
                break
            self._chunk_line(data[at:line_end])
            at = line_end + 2
        return parts

    def _keep_partial_line(self, line: bytes) -> None:
        if len(line) > _MAX_LINE or (self._mode == "payload-end" and line != b"\r"):
            raise HttpError(f"a broken chunk: {line[:40]!r}")
        self._buffer = line

    def _chunk_line(self, line: bytes) -> None:
        if self._mode == "payload-end":
            if line:
                raise HttpError(f"a chunk longer than its size says: {line[:40]!r}")
            self._mode = "size"
        elif self._mode == "size":
            digits = line.split(b";", 1)[0].rstrip(b" \t")
            if not digits or len(digits) > 15 or not _HEX.issuperset(digits):
                raise HttpError(f"a chunk size of {line[:40]!r}")
            self._need = int(digits, 16)
            self._mode = "payload" if self._need else "trailers"
        elif not line:
            self._mode, self.complete = "done", True
