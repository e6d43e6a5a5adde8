"""The fast client: HTTP/1.1 over raw sockets and epoll, for rates at which httpx would be what is measured.

Each turn of the loop first reads every socket that has something, with the time of each read, and parses afterwards:
so parsing one stream does not delay the time stamps of the others.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from arkbench.targets._exchange import Exchange
from arkbench.targets._http1 import HttpError, ResponseParser
from arkbench.targets._job import LAG_PERIOD_S, Job, JobStats, WireRequest, peak_memory
from arkbench.targets._plan import Plan
from arkbench.targets.base import Answer

_READ = 1 << 18
_WRITE = 1 << 18
_CONNECT_TIMEOUT_S = 10.0
_CONNECT_WAVE = 128
_SPIN_S = 0.004
_IN, _OUT, _GONE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR


class _Connection:
    """One socket and the exchange it carries, if any."""

    __slots__ = ("connecting", "exchange", "lane", "out", "parser", "seen_head", "sock", "writing")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.connecting = self.writing = True
        self.exchange: Exchange | None = None
        self.parser = ResponseParser()
        self.out = memoryview(b"")
        self.lane = -1
        self.seen_head = False


class RawClient:
    """Runs one job. `poll_outside` is called about every 5 ms; it returns True to cancel what runs."""

    def __init__(self, job: Job, on_answer: Callable[[Answer], None], poll_outside: Callable[[], bool]) -> None:
        self._job = job
        self._on_answer = on_answer
        self._poll_outside = poll_outside
        self._plan = Plan(job)
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: deque[_Connection] = deque()
        self._ready: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._awaiting: deque[tuple[float, _Connection, Exchange]] = deque()
        self._stats = JobStats()
        self._cancelled = False
        endpoint = job.endpoint
        info = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0]
        self._family, self._address = info[0], info[4]
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        lines = [f"POST {endpoint.path}{job.form.path} HTTP/1.1", f"Host: {host}:{endpoint.port}"]
        lines += ["Accept: text/event-stream", "Accept-Encoding: identity", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in endpoint.headers]
        self._head = "\r\n".join(lines).encode("latin-1")

    def open_connections(self) -> None:
        """One connection a lane (at most 256 for an open loop, which makes more as it needs them)."""
        wanted = self._plan.lanes if self._job.mode != "open" else min(self._plan.lanes, 256)
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        for start in range(0, wanted, _CONNECT_WAVE):
            wave = [self._connect() for _ in range(min(_CONNECT_WAVE, wanted - start))]
            while any(c.connecting for c in wave) and time.monotonic() < deadline:
                for fd, mask in self._epoll.poll(0.05):
                    self._connected(self._connections[fd], mask)
                if self._poll_outside():
                    self._cancelled = True
                    return
            for connection in wave:
                if connection.connecting:
                    self._drop(connection)
                elif connection.sock.fileno() >= 0:
                    self._idle.append(connection)
        # No collection may stop the loop while the clock runs; what a load makes has no cycles.
        gc.collect()
        gc.disable()

    def run(self, release: float) -> JobStats:
        """Sends the load from `release` (monotonic seconds) on, until everything has ended or was cut."""
        try:
            self._plan.release(release)
            self._load_first(release)
            self._wait_until(release)
            cpu = time.process_time()
            self._loop()
            self._stats.cpu_s = time.process_time() - cpu
            self._stats.wall_s = time.monotonic() - release
        finally:
            gc.enable()
            self._close()
        self._stats.rss_bytes = peak_memory()
        return self._stats

    def _wait_until(self, release: float) -> None:
        """Sleeps, and turns the last moment in a loop: a sleeping process wakes late."""
        while not self._cancelled and (left := release - time.monotonic()) > _SPIN_S:
            time.sleep(min(left - _SPIN_S, 0.05))
            self._cancelled = self._poll_outside() or self._cancelled
        while time.monotonic() < release:
            pass

    # ------------------------------------------------------------------------------------------ the loop

    def _loop(self) -> None:
        next_tick = time.monotonic() + LAG_PERIOD_S
        if not self._cancelled:
            self._send_first()
        while not self._cancelled and (self._busy or self._plan.waiting):
            now = time.monotonic()
            due = self._plan.next_due()
            wake = next_tick if due is None else min(due, next_tick)
            events = self._epoll.poll(max(wake - now, 0.0))
            self._serve(events)
            now = time.monotonic()
            if now >= next_tick:
                self._stats.lags_s.append(now - next_tick)
                self._tick(now)
                next_tick = max(next_tick + LAG_PERIOD_S, time.monotonic())
            if (due := self._plan.next_due()) is not None and due <= now:
                self._send_due()
        if self._cancelled:
            self._cut("cancelled")

    def _serve(self, events: list[tuple[int, int]]) -> None:
        arrivals = []
        clock = time.monotonic
        for fd, mask in events:
            connection = self._connections.get(fd)
            if connection is None:
                continue
            if connection.connecting:
                self._connected(connection, mask)
                if connection.connecting or not mask & _IN:
                    continue
            if mask & (_IN | _GONE):
                try:
                    data = connection.sock.recv(_READ)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                arrivals.append((connection, data, clock()))
            elif mask & _OUT:
                self._write(connection)
        for connection, data, now in arrivals:
            self._received(connection, data, now)

    def _tick(self, now: float) -> None:
        limit = self._job.first_token_timeout_s
        while self._awaiting and (
            self._awaiting[0][1].exchange is not self._awaiting[0][2]
            or self._awaiting[0][2].has_first_token
            or now >= self._awaiting[0][0]
        ):
            _, connection, exchange = self._awaiting.popleft()
            if connection.exchange is exchange and not exchange.has_first_token:
                exchange.fail(f"no first token within {limit:g} s", "timeout")
                self._finish(connection, False, now)
        cut_at = self._plan.cut_at()
        if cut_at is not None and now >= cut_at:
            self._cut(f"still running {self._job.grace_s:g} s after the load: cut")
        self._cancelled = self._poll_outside() or self._cancelled

    # --------------------------------------------------------------------------------------- sending

    def _load_first(self, release: float) -> None:
        """Makes everything of the requests due at the release, so that sending one is little more than its write."""
        while (item := self._plan.pop(release)) is not None:
            self._ready.append(self._load(*item))

    def _send_first(self) -> None:
        for connection in self._ready:
            self._launch(connection)
        if self._job.mode == "closed":
            for connection in self._ready:
                self._plan.prepare(connection.lane)
        self._ready.clear()

    def _send_due(self) -> None:
        while (item := self._plan.pop(time.monotonic())) is not None:
            connection = self._load(*item)
            self._launch(connection)
            if self._job.mode == "closed":
                self._plan.prepare(connection.lane)
            if self._job.mode == "open" and len(self._idle) < 4 and self._plan.waiting:
                self._idle.append(self._connect())

    def _load(self, lane: int, due: float, request: WireRequest, body: bytes) -> _Connection:
        """A connection with the request in it, nothing of it sent."""
        connection = self._idle.popleft() if self._idle else self._connect()
        while connection.sock.fileno() < 0 and self._idle:
            connection = self._idle.popleft()
        if connection.sock.fileno() < 0:
            connection = self._connect()
        connection.exchange, connection.parser = Exchange(Answer(request.request, due)), ResponseParser()
        connection.lane, connection.seen_head = lane, False
        head = self._head + b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.out = memoryview(head + body)
        return connection

    def _launch(self, connection: _Connection) -> None:
        exchange = connection.exchange
        assert exchange is not None
        now, due = time.monotonic(), exchange.answer.scheduled
        exchange.answer.sent = due if self._job.mode == "burst" else now
        self._busy.add(connection)
        if not connection.connecting:
            self._write(connection)
        self._stats.send_lags_s.append(now - due)
        self._stats.most_in_flight = max(self._stats.most_in_flight, len(self._busy))
        self._awaiting.append((now + self._job.first_token_timeout_s, connection, exchange))

    def _write(self, connection: _Connection) -> None:
        if not connection.out or connection.connecting:
            return
        try:
            sent = connection.sock.send(connection.out if len(connection.out) <= _WRITE else connection.out[:_WRITE])
            connection.out = connection.out[sent:]
            if not connection.out and connection.exchange is not None:
                self._stats.body_sent_s.append(time.monotonic() - connection.exchange.answer.scheduled)
        except BlockingIOError:
            pass
        except OSError:
            # The peer may have answered (a refusal) before it closed: what it said is still to be read.
            connection.out = memoryview(b"")
        self._watch(connection)

    def _watch(self, connection: _Connection) -> None:
        """Asks for writability exactly while something waits to be written."""
        writing = bool(connection.out)
        if connection.writing != writing and connection.sock.fileno() >= 0:
            connection.writing = writing
            self._epoll.modify(connection.sock.fileno(), _IN | _OUT if writing else _IN)

    # ------------------------------------------------------------------------------------- receiving

    def _received(self, connection: _Connection, data: bytes, now: float) -> None:
        exchange, parser = connection.exchange, connection.parser
        if exchange is None:
            self._drop(connection)
            return
        if not data:
            parser.end_of_stream()
            self._finish(connection, parser.complete, now)
            return
        try:
            parts = parser.feed(data)
        except HttpError as error:
            exchange.fail(str(error))
            self._finish(connection, False, now)
            return
        if parser.status and not connection.seen_head:
            connection.seen_head = True
            exchange.head(parser.status, parser.headers.get("content-type", ""))
        for part in parts:
            exchange.body(part, now)
        if parser.complete or exchange.failed:
            self._finish(connection, parser.complete, now)

    def _finish(self, connection: _Connection, clean: bool, now: float) -> None:
        exchange, lane = connection.exchange, connection.lane
        reusable = clean and connection.parser.complete and connection.parser.keep_alive and not connection.out
        connection.exchange = None
        self._busy.discard(connection)
        if reusable:
            self._idle.append(connection)
        else:
            self._drop(connection)
        answer = exchange.end(clean)
        self._stats.pieces += len(answer.piece_times)
        self._stats.estimated_counts += exchange.estimated
        self._on_answer(answer)
        if self._job.mode == "closed":
            self._plan.ended(lane, now)

    def _cut(self, why: str) -> None:
        self._cancelled = True
        now = time.monotonic()
        for connection in list(self._busy):
            connection.exchange.fail(why, "cancelled")
            self._stats.cut += 1
            self._finish(connection, False, now)

    # ----------------------------------------------------------------------------------- connections

    def _connect(self) -> _Connection:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        with contextlib.suppress(OSError):
            sock.connect_ex(self._address)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), _IN | _OUT)
        return connection

    def _connected(self, connection: _Connection, mask: int) -> None:
        error = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            connection.connecting = False
            self._connection_failed(connection, error)
        elif mask & (_OUT | _IN):
            connection.connecting = False
            if connection.out:
                self._write(connection)
            else:
                self._watch(connection)

    def _connection_failed(self, connection: _Connection, error: int) -> None:
        if connection.exchange is None:
            self._drop(connection)
            return
        endpoint = self._job.endpoint
        connection.exchange.fail(f"no connection to {endpoint.host}:{endpoint.port} ({os.strerror(error)})")
        self._finish(connection, False, time.monotonic())

    def _drop(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if fd >= 0:
            self._connections.pop(fd, None)
            connection.sock.close()

    def _close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._epoll.close()
