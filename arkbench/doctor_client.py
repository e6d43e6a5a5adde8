"""How fast this machine's client is: its figures against a server whose answers are known."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

from arkbench.known_answer import KnownAnswerProcess
from arkbench.targets.base import Answer, Load, PlannedRequest
from arkbench.targets.openai import ClientChoice, OpenAITarget, quantile


@dataclass(frozen=True)
class Shape:
    """A load whose true figures are known: every stream's first token after `first_s`, then one every `gap_s`."""

    name: str
    streams: int
    first_s: float
    gap_s: float
    tokens: int
    prompt_tokens: int = 32
    client: ClientChoice = "auto"
    mode: Literal["burst", "together"] = "together"


@dataclass(frozen=True)
class ClientRow:
    """What the client made of a shape.

    Errors are measured minus true (of gaps: the median's). `send_spread_s`: from the release until the last request
    was on its way. `server_late_p99_s`: how late the server's own writes were.
    """

    shape: Shape
    answered: int
    most_in_flight: int
    pieces_s: float
    ttft_error_p50_s: float | None
    ttft_error_p99_s: float | None
    gap_error_s: float | None
    cpu_s_per_1k: float
    rss_bytes: int
    send_spread_s: float
    server_late_p99_s: float
    valid: bool
    reason: str


SHAPES = (
    Shape("1 stream, a token every 20 ms", 1, 0.2, 0.02, 32),
    Shape("64 streams, a token every 20 ms", 64, 0.2, 0.02, 64),
    Shape("256 streams, a token every 20 ms", 256, 0.2, 0.02, 64),
    Shape("1,000 streams, a token every 100 ms", 1000, 0.2, 0.1, 20),
    Shape("16 streams, no delay", 16, 0.0, 0.0, 1000),
)


class KnownServer(Protocol):
    """A known-answer server in a process of its own."""

    url: str


SERVER_LATE_S = 0.005
"""A server later than this at the 99th percentile is named beside the client's figures: part of the error is its."""

StartServer = Callable[[Shape], AbstractContextManager[KnownServer]]


def python_server(shape: Shape) -> AbstractContextManager[KnownServer]:
    return KnownAnswerProcess(first_s=shape.first_s, gap_s=shape.gap_s)


def measure_shape(shape: Shape, server: StartServer = python_server) -> ClientRow:
    """Drives a shape once against a fresh server, after a warm-up of a few requests."""
    answers: list[Answer] = []
    with server(shape) as running:
        target = OpenAITarget(running.url, client=shape.client)
        try:
            target.start({}, shape.streams, shape.prompt_tokens + shape.tokens, 0)
            target.run(Load(_requests(shape, min(shape.streams, 16), 2), shape.mode), lambda answer: None)
            report = target.run(Load(_requests(shape, shape.streams, shape.tokens), shape.mode), answers.append)
            late = lateness(running.url)
        finally:
            target.close()
    return _row(shape, answers, target, report.valid, report.reason, late["p99"])


def findings() -> Iterator[tuple[str, str]]:
    """SHAPES in words, as `arkbench doctor` prints them: what was driven, what came of it. About ten seconds."""
    for shape in SHAPES:
        row = measure_shape(shape)
        text = f"{row.pieces_s:,.0f} pieces/s"
        if row.ttft_error_p50_s is not None and row.ttft_error_p99_s is not None and shape.gap_s:
            text += (
                f", TTFT {row.ttft_error_p50_s * 1e3:+.1f} ms (99th percentile {row.ttft_error_p99_s * 1e3:+.1f} ms)"
            )
        text += f", {row.cpu_s_per_1k * 1e3:.0f} ms of CPU per 1,000 pieces"
        if row.server_late_p99_s > SERVER_LATE_S:
            text += f"; the test server itself was {row.server_late_p99_s * 1e3:.0f} ms late"
        yield f"client, {shape.name}", text + ("; it keeps up" if row.valid else f"; {row.reason}")


def lateness(url: str) -> dict[str, Any]:
    """How late a known-answer server's own writes were (seconds): p50, p99, max; and how many."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/lateness") as response:
        return json.load(response)


def _requests(shape: Shape, count: int, tokens: int) -> list[PlannedRequest]:
    body = list(range(1000, 1000 + shape.prompt_tokens - 1))
    return [PlannedRequest(n, [n, *body], tokens) for n in range(count)]


def _row(
    shape: Shape, answers: list[Answer], target: OpenAITarget, valid: bool, reason: str, late_p99: float
) -> ClientRow:
    ok = [a for a in answers if a.status == "ok" and a.sent is not None]
    ttft = [a.piece_times[0] - a.sent - shape.first_s for a in ok]
    gap = quantile([b - a for answer in ok for a, b in pairwise(answer.piece_times)], 0.5)
    span = max((a.piece_times[-1] for a in ok), default=0.0) - min((a.sent for a in ok), default=0.0)
    pieces = sum(len(a.piece_times) for a in ok)
    stats = target.client_stats
    if len(ok) < shape.streams:
        failures = sorted({a.error or a.status for a in answers if a.status != "ok"})
        valid, reason = False, f"{shape.streams - len(ok)} requests failed: {'; '.join(failures[:3])}"
    return ClientRow(
        shape=shape,
        answered=len(ok),
        most_in_flight=sum(s.most_in_flight for s in stats),
        pieces_s=pieces / span if span else 0.0,
        ttft_error_p50_s=quantile(ttft, 0.5),
        ttft_error_p99_s=quantile(ttft, 0.99),
        gap_error_s=abs(gap - shape.gap_s) if gap is not None and shape.gap_s else None,
        cpu_s_per_1k=sum(s.cpu_s for s in stats) / max(pieces, 1) * 1000,
        rss_bytes=sum(s.rss_bytes for s in stats),
        send_spread_s=max((max(s.body_sent_s, default=0.0) for s in stats), default=0.0),
        server_late_p99_s=late_p99,
        valid=valid,
        reason=reason,
    )
