"""The default client: httpx, one connection a stream. How far it goes stands in docs/client.md.

Every stream has an httpx client of its own: in a shared one, each request looks through all connections of the pool,
and at 64 streams that is most of the work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import httpx

from arkbench.targets._exchange import Exchange
from arkbench.targets._job import LAG_PERIOD_S, Job, JobStats, WireRequest, peak_memory
from arkbench.targets._plan import Plan
from arkbench.targets.base import Answer


class HttpxClient:
    """Runs one job on an asyncio loop; the same interface as RawClient."""

    def __init__(self, job: Job, on_answer: Callable[[Answer], None], poll_outside: Callable[[], bool]) -> None:
        self._job = job
        self._on_answer = on_answer
        self._poll_outside = poll_outside
        self._plan = Plan(job)
        self._stats = JobStats()
        self._running: dict[asyncio.Task, Exchange] = {}
        self._stop = False
        self._loop = asyncio.new_event_loop()
        self._tls = httpx.create_ssl_context()
        self._idle: deque[httpx.AsyncClient] = deque()
        self._url = job.endpoint.base + job.form.path

    def open_connections(self) -> None:
        """Opens one connection a lane, by as many simultaneous requests for the model list."""
        lanes = min(self._plan.lanes, 256) if self._job.mode == "open" else self._plan.lanes
        self._idle.extend(self._new_client() for _ in range(lanes))

        async def warm() -> None:
            url = self._job.endpoint.base + "/models"
            await asyncio.gather(*(http.get(url) for http in self._idle), return_exceptions=True)

        self._loop.run_until_complete(warm())

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=600.0)
        headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **dict(self._job.endpoint.headers),
        }
        timeout = httpx.Timeout(None, connect=10.0)
        return httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, verify=self._tls, trust_env=False)

    def run(self, release: float) -> JobStats:
        """Sends the load from `release` (monotonic seconds) on, until everything has ended or was cut."""
        try:
            self._loop.run_until_complete(self._run(release))
        finally:
            self._loop.close()
        self._stats.rss_bytes = peak_memory()
        return self._stats

    async def _run(self, release: float) -> None:
        self._plan.release(release)
        await asyncio.sleep(max(release - time.monotonic(), 0))
        cpu = time.process_time()
        ticker = asyncio.ensure_future(self._tick())
        while not self._stop and (self._running or self._plan.waiting):
            if ticker.done():
                ticker.result()
            self._send_due()
            due = self._plan.next_due()
            pause = 0.02 if due is None else max(min(due - time.monotonic(), 0.02), 0)
            if self._running:
                await asyncio.wait(self._running, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(pause)
        ticker.cancel()
        await self._cancel_running("cancelled")
        self._stats.cpu_s = time.process_time() - cpu
        self._stats.wall_s = time.monotonic() - release
        for http in self._idle:
            await http.aclose()

    def _send_due(self) -> None:
        while (item := self._plan.pop(time.monotonic())) is not None:
            lane, due, request, body = item
            exchange = Exchange(Answer(request.request, due))
            task = self._loop.create_task(self._exchange(lane, due, request, body, exchange))
            self._running[task] = exchange
            task.add_done_callback(self._running.pop)
            self._stats.most_in_flight = max(self._stats.most_in_flight, len(self._running))
            if self._job.mode == "closed":
                self._plan.prepare(lane)

    async def _exchange(self, lane: int, due: float, request: WireRequest, body: bytes, exchange: Exchange) -> None:
        now = time.monotonic()
        exchange.answer.sent = due if self._job.mode == "burst" else now
        self._stats.send_lags_s.append(now - due)
        clean, why = False, "the connection was cut"
        http = self._idle.popleft() if self._idle else self._new_client()
        try:
            async with http.stream("POST", self._url, content=body) as response:
                exchange.head(response.status_code, response.headers.get("content-type", ""))
                async for data in response.aiter_raw():
                    exchange.body(data, time.monotonic())
                    if exchange.failed:
                        break
                clean = not exchange.failed
        except httpx.ConnectError as error:
            why = f"no connection to {self._job.endpoint.host}:{self._job.endpoint.port} ({error})"
        except httpx.HTTPError as error:
            why = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            exchange.fail("cancelled", "cancelled")
        finally:
            self._idle.append(http)
        answer = exchange.end(clean, why)
        self._stats.pieces += len(answer.piece_times)
        self._stats.estimated_counts += exchange.estimated
        self._on_answer(answer)
        if self._job.mode == "closed":
            self._plan.ended(lane, time.monotonic())

    async def _tick(self) -> None:
        limit = self._job.first_token_timeout_s
        while True:
            due = time.monotonic() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            now = time.monotonic()
            self._stats.lags_s.append(now - due)
            for task, exchange in list(self._running.items()):
                sent = exchange.answer.sent
                if sent is not None and not exchange.has_first_token and now - sent >= limit:
                    exchange.fail(f"no first token within {limit:g} s", "timeout")
                    task.cancel()
            cut_at = self._plan.cut_at()
            if cut_at is not None and now >= cut_at:
                self._stats.cut += len(self._running)
                self._stop = True
                await self._cancel_running(f"still running {self._job.grace_s:g} s after the load: cut")
            self._stop = self._stop or self._poll_outside()

    async def _cancel_running(self, why: str) -> None:
        running = dict(self._running)
        for task, exchange in running.items():
            exchange.fail(why, "cancelled")
            task.cancel()
        if running:
            await asyncio.wait(running)
