"""Which request is due when: the three modes of a load, without I/O and without a clock."""

from __future__ import annotations

import heapq
from collections import deque

from arkbench.targets._job import Job, WireRequest

# Bodies are made before the clock starts up to this many prompt tokens in all; past it, one ahead for each stream.
_PREBUILT_TOKENS = 8_000_000


class Plan:
    """Hands out requests as they fall due. `release` is the moment of the start, in monotonic seconds.

    A lane is a stream of a closed loop, or one request of the other modes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._lanes: dict[int, deque[WireRequest]] = {}
        self._due: list[tuple[float, int, int]] = []
        self._bodies: dict[int, bytes] = {}
        self._stop_at: float | None = None
        self.last_due: float | None = None
        for request in job.requests:
            lane = request.stream if job.mode == "closed" else request.request
            self._lanes.setdefault(lane, deque()).append(request)
        total = sum(len(request.prompt) // 4 for request in job.requests)
        for requests in self._lanes.values():
            for request in requests if total <= _PREBUILT_TOKENS else [requests[0]]:
                self._build(request)

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    @property
    def waiting(self) -> bool:
        """Some request has not been handed out yet."""
        return bool(self._due)

    def release(self, at: float) -> None:
        if self._job.duration_s is not None:
            self._stop_at = at + self._job.duration_s
        for order, (lane, requests) in enumerate(self._lanes.items()):
            heapq.heappush(self._due, (at + requests[0].offset_s, order, lane))

    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None

    def pop(self, now: float) -> tuple[int, float, WireRequest, bytes] | None:
        """The next request that is due at `now`: lane, due time, request, body. None past the duration."""
        while self._due and self._due[0][0] <= now:
            due, _, lane = heapq.heappop(self._due)
            if self._stop_at is not None and due >= self._stop_at:
                continue
            request = self._lanes[lane].popleft()
            self.last_due = max(due, self.last_due or due)
            body = self._bodies.pop(request.request, None)
            return lane, due, request, body if body is not None else self._make(request)
        return None

    def prepare(self, lane: int) -> None:
        """Builds the body of the lane's next request, while its present one is under way."""
        if self._lanes[lane] and self._lanes[lane][0].request not in self._bodies:
            self._build(self._lanes[lane][0])

    def ended(self, lane: int, now: float) -> None:
        """The lane's request has ended: its next one is due at once."""
        if self._lanes[lane]:
            heapq.heappush(self._due, (now, lane, lane))

    def cut_at(self) -> float | None:
        """When what still runs is cut: grace after the end of the duration, or after the last request went out."""
        if self._stop_at is not None:
            return self._stop_at + self._job.grace_s
        if self._due or self.last_due is None or any(self._lanes.values()):
            return None
        return self.last_due + self._job.grace_s

    def _build(self, request: WireRequest) -> None:
        self._bodies[request.request] = self._make(request)

    def _make(self, request: WireRequest) -> bytes:
        return self._job.form.build(request.ids(), request.output_tokens)
