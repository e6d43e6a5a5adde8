"""The HTTP target: any OpenAI-compatible endpoint, driven from client processes of its own.

A load goes to one or several client processes, which open their connections, say so, and are released together at
one moment of the machine's monotonic clock. httpx drives small loads and every https endpoint; above
HTTPX_STREAMS streams the raw client does, since httpx itself would be measured (docs/client.md).
"""

from __future__ import annotations

import os
import select
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from arkbench.targets._channel import ChannelClosed
from arkbench.targets._job import Job, JobStats, WireRequest
from arkbench.targets._worker import ClientProcess
from arkbench.targets.base import Answer, Load, LoadReport, PlannedRequest, TargetError, TargetInfo
from arkbench.targets.endpoint import Probed, parse_url, probe

HTTPX_STREAMS = 8
STREAMS_PER_PROCESS = 512
LAG_LIMIT_S = 0.020
CPU_LIMIT = 0.90
SEND_LIMIT_S = 0.100
_RELEASE_AHEAD_S = 0.05
ClientChoice = Literal["auto", "httpx", "raw"]


class OpenAITarget:
    """Implements base.Target. `client_stats`: what the client processes saw of themselves in the last load."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        client: ClientChoice = "auto",
        processes: int | None = None,
    ) -> None:
        self._endpoint = parse_url(url, api_key)
        self._model = model
        self._client = client
        self._wanted_processes = processes
        self._processes: list[ClientProcess] = []
        self._probed: Probed | None = None
        self.client_stats: list[JobStats] = []

    def start(self, switches: dict[str, str], max_streams: int, max_tokens: int, cache_tokens: int) -> TargetInfo:
        """Finds out how the endpoint is asked and starts the client processes; raises TargetError."""
        wanted = self._wanted_processes or _processes_for(max_streams)
        while len(self._processes) < wanted:
            self._processes.append(ClientProcess())
        if self._probed is None:
            self._probed = probe(self._endpoint, self._model)
        return _target_info(self._probed, switches)

    def run(self, load: Load, on_answer: Callable[[Answer], None]) -> LoadReport:
        """Sends a load (base.Target.run). What the client itself could not keep up with makes the report invalid."""
        if self._probed is None:
            raise TargetError("the target has not been started")
        asked = {r.request: (len(r.prompt), r.output_tokens) for r in load.requests}
        lengths = _LengthCheck(asked)

        def taken(answer: Answer) -> None:
            lengths.see(answer)
            on_answer(answer)

        jobs = self._jobs(load)
        self.client_stats = self._drive(jobs, taken)
        return client_report(self.client_stats, load.mode, lengths.notes())

    def next_token(self, prompt: Sequence[int]) -> None:
        """Nothing: of an answer only its text is known."""

    def close(self) -> None:
        for process in self._processes:
            process.close()
        self._processes = []

    # ---------------------------------------------------------------------------------------- inside

    def _jobs(self, load: Load) -> list[Job]:
        streams = len({r.stream for r in load.requests}) if load.mode == "closed" else len(load.requests)
        used = min(len(self._processes), max(streams, 1))
        client = self._client
        if client == "auto":
            client = "httpx" if self._endpoint.scheme == "https" or streams <= HTTPX_STREAMS else "raw"
        if client == "raw" and self._endpoint.scheme == "https":
            raise TargetError("the raw client does not speak https: use the httpx client for this endpoint")
        shares: list[list[WireRequest]] = [[] for _ in range(used)]
        for index, request in enumerate(load.requests):
            shares[(request.stream if load.mode == "closed" else index) % used].append(_wire(request))
        return [
            Job(
                self._endpoint,
                self._probed.form,
                tuple(share),
                load.mode,
                load.duration_s,
                load.first_token_timeout_s,
                load.grace_s,
                client,
            )
            for share in shares
        ]

    def _drive(self, jobs: list[Job], on_answer: Callable[[Answer], None]) -> list[JobStats]:
        channels = [process.channel for process in self._processes[: len(jobs)]]
        stats: list[JobStats] = []
        ready = 0
        try:
            for channel, job in zip(channels, jobs, strict=True):
                channel.send(("job", job))
            while len(stats) < len(jobs):
                for kind, value in _messages(channels):
                    if kind == "answers":
                        for answer in value:
                            on_answer(answer)
                    elif kind == "done":
                        stats.append(value)
                    else:
                        ready += 1
                        if ready == len(jobs):
                            _tell(channels, ("release", time.monotonic() + _RELEASE_AHEAD_S))
        except ChannelClosed:
            self.close()
            raise TargetError("a client process ended in the middle of a load: its error stands above") from None
        except BaseException:
            self._cancel(channels, len(jobs) - len(stats), on_answer)
            raise
        return stats

    def _cancel(self, channels: list, running: int, on_answer: Callable[[Answer], None]) -> None:
        """Cuts what runs and hands it over, so that no request is lost."""
        try:
            _tell(channels, ("cancel", None))
            while running:
                for kind, value in _messages(channels):
                    if kind == "answers":
                        for answer in value:
                            on_answer(answer)
                    running -= kind == "done"
        except ChannelClosed:
            self.close()


def _messages(channels: list) -> list[tuple]:
    """What has come from the client processes; writes on to those that still have to be told something."""
    unsent = [c for c in channels if c.unsent]
    readable, writable, _ = select.select(channels, unsent, [], 1.0)
    for channel in writable:
        channel.flush()
    return list(chain.from_iterable(channel.receive() for channel in readable))


def _tell(channels: list, message: tuple) -> None:
    for channel in channels:
        channel.send(message)


def _wire(request: PlannedRequest) -> WireRequest:
    prompt = array("i", request.prompt).tobytes()
    return WireRequest(request.request, prompt, request.output_tokens, request.offset_s, request.stream)


def _processes_for(streams: int) -> int:
    """One client process for STREAMS_PER_PROCESS streams, and never more than half of the cores."""
    return max(1, min((os.cpu_count() or 1) // 2, -(-streams // STREAMS_PER_PROCESS)))


def _target_info(probed: Probed, switches: dict[str, str]) -> TargetInfo:
    """What the endpoint says of itself; the bundled engine's server says more than others (`meta` of its card)."""
    meta = probed.card.get("meta") or {}
    notes = list(probed.notes)
    own = meta.get("switches")
    differing = sorted(k for k, v in switches.items() if own is not None and own.get(k) != v)
    if differing:
        notes.append(f"the endpoint runs with {', '.join(f'{k}={own.get(k)}' for k in differing)}")
    elif switches and own is None:
        notes.append("the endpoint's switches are not known")
    return TargetInfo(
        name=probed.endpoint.base,
        model=probed.form.model,
        device=meta.get("device", ""),
        step_weight_bytes=meta.get("step_weight_bytes"),
        cache_bytes_per_token=meta.get("cache_bytes_per_token"),
        state_bytes_per_request=meta.get("state_bytes_per_request"),
        vocab=meta.get("n_vocab"),
        start_seconds=meta.get("start_seconds") or {},
        notes=tuple(notes),
    )


@dataclass
class _LengthCheck:
    """Counts answers whose lengths are not those that were asked for."""

    asked: dict[int, tuple[int, int]]

    def __post_init__(self) -> None:
        self._prompts: list[tuple[int, int]] = []
        self._outputs: list[tuple[int, int]] = []

    def see(self, answer: Answer) -> None:
        prompt, output = self.asked[answer.request]
        if answer.prompt_tokens is not None and answer.prompt_tokens != prompt:
            self._prompts.append((prompt, answer.prompt_tokens))
        if answer.status == "ok" and answer.output_tokens != output:
            self._outputs.append((output, answer.output_tokens))

    def notes(self) -> tuple[str, ...]:
        total = len(self.asked)
        pairs = (("prompts", self._prompts), ("answers", self._outputs))
        return tuple(_difference(what, seen, total) for what, seen in pairs if seen)


def _difference(what: str, seen: list[tuple[int, int]], total: int) -> str:
    low = min(served - asked for asked, served in seen)
    high = max(served - asked for asked, served in seen)
    by = f"{low:+d}" if low == high else f"{low:+d} to {high:+d}"
    return f"{len(seen)} of {total} {what} were not as long as asked: {by} tokens by the endpoint's usage"


def client_report(stats: Sequence[JobStats], mode: str, notes: tuple[str, ...] = ()) -> LoadReport:
    """Whether the client was the limit of a load: a late loop, a full core, or requests that left late."""
    lag = max((d for s in stats if (d := arrival_delay(s.lags_s, s.wall_s, 0.99)) is not None), default=None)
    send_lag = quantile(list(chain.from_iterable(s.send_lags_s for s in stats)), 0.99)
    cpu = max((s.cpu_s / s.wall_s for s in stats if s.wall_s > 0.2), default=0.0)
    reasons = []
    if lag is not None and lag > LAG_LIMIT_S:
        reasons.append(
            f"its loop held pieces up by {lag * 1e3:.0f} ms at the 99th percentile (limit {LAG_LIMIT_S * 1e3:.0f} ms)"
        )
    if cpu > CPU_LIMIT:
        reasons.append(f"it filled {cpu:.0%} of a core (limit {CPU_LIMIT:.0%})")
    if mode != "closed" and send_lag is not None and send_lag > SEND_LIMIT_S:
        reasons.append(f"requests left {send_lag * 1e3:.0f} ms late (limit {SEND_LIMIT_S * 1e3:.0f} ms)")
    cut = sum(s.cut for s in stats)
    if cut:
        notes += (f"{cut} requests were still running after the grace time and were cut",)
    estimated = sum(s.estimated_counts for s in stats)
    if estimated:
        notes += (f"{estimated} answers: the tokens of a piece are estimated from its text, their sum is the usage's",)
    reason = "the client was the limit: " + "; ".join(reasons) if reasons else ""
    return LoadReport(valid=not reasons, reason=reason, client_lag_p99_s=lag, notes=notes)


def arrival_delay(lags_s: Sequence[float], wall_s: float, q: float) -> float | None:
    """The delay, in seconds, that a share q of arrivals at random moments would have seen from a loop.

    A loop that was late by L for once held up whatever arrived in those L seconds, by anything between L and nothing:
    the answer d solves sum(max(0, L - d)) = (1 - q) * wall_s. None without samples.
    """
    if not lags_s:
        return None
    allowed = (1 - q) * wall_s
    ordered = sorted((max(lag, 0.0) for lag in lags_s), reverse=True)
    above = 0.0
    for count, lag in enumerate(ordered, start=1):
        above += lag
        lower = ordered[count] if count < len(ordered) else 0.0
        if above - count * lower >= allowed:
            return (above - allowed) / count
    return 0.0


def quantile(values: Sequence[float], q: float) -> float | None:
    """The value below which a share q of the values lies (nearest rank, rounded down); None without values."""
    ordered = sorted(values)
    return ordered[int(q * (len(ordered) - 1))] if ordered else None
