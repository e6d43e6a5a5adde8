"""From records to figures: pure functions, no torch. The definitions are those that every report prints.

Times are seconds, rates tokens per second. A figure that does not apply, or that the records do not allow, is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from arkbench.records import RequestRecord

ABOVE_LIMIT = "above the measured limit: the limit was measured too low"


@dataclass(frozen=True)
class Window:
    """The steady window of N streams: from `start_s` (excluded) to `end_s` (included), `tokens` made in it."""

    start_s: float
    end_s: float
    tokens: int

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def tok_s(self) -> float:
        return self.tokens / self.length_s


def quantile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile (0 to 1) of values, linear between neighbours; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float | None:
    return quantile(values, 0.5)


def spread(values: Sequence[float]) -> float | None:
    """(largest - smallest) / median: how far repetitions lie apart. None for fewer than two values or a median of 0."""
    middle = median(values)
    if len(values) < 2 or not middle:
        return None
    return (max(values) - min(values)) / abs(middle)


# ------------------------------------------------------------------------------------------------ one request


def ttft(record: RequestRecord) -> float | None:
    """Time to first token: from `sent_s` to the first generated token on any channel."""
    if record.sent_s is None or record.first_token_s is None:
        return None
    return record.first_token_s - record.sent_s


def ttft_from_schedule(record: RequestRecord) -> float | None:
    """Time to first token from the time at which the request was due: what an open loop is judged by."""
    if record.first_token_s is None:
        return None
    return record.first_token_s - record.scheduled_s


def tpot(record: RequestRecord) -> float | None:
    """Time per output token: (last token - first piece) / (output tokens - tokens in the first piece)."""
    if record.first_token_s is None or record.last_token_s is None or not record.token_counts:
        return None
    later = record.output_tokens - record.token_counts[0]
    if later <= 0:
        return None
    return (record.last_token_s - record.first_token_s) / later


def token_gaps(record: RequestRecord) -> list[float]:
    """Inter-token latencies of one request: a piece of n tokens counts as n gaps of gap / n."""
    gaps: list[float] = []
    for before, now, count in zip(
        record.token_times_s, record.token_times_s[1:], record.token_counts[1:], strict=False
    ):
        if count > 0:
            gaps += [(now - before) / count] * count
    return gaps


# ------------------------------------------------------------------------------------------------ many requests


def made_tokens(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records whose tokens count in a window: answered, or cut at the end of the load."""
    return [r for r in records if r.status in ("ok", "cancelled") and r.first_token_s is not None]


def steady_window(records: Sequence[RequestRecord], streams: int) -> tuple[Window | None, str]:
    """The steady window of `streams` streams, or None and why there is none.

    It begins when the last stream has its first token and ends when the first stream ends for good. A stream of a
    closed loop goes on with its next request, so with M requests the end is that of request M - N + 1 in the order
    in which they ended: every earlier one was followed by another.
    """
    live = made_tokens(records)
    if len(live) < streams:
        return None, f"only {len(live)} of {streams} streams made tokens"
    firsts = sorted(live, key=lambda r: (r.sent_s if r.sent_s is not None else r.scheduled_s, r.request))[:streams]
    start = max(r.first_token_s for r in firsts if r.first_token_s is not None)
    ends = sorted(r.last_token_s for r in live if r.last_token_s is not None)
    end = ends[len(live) - streams]
    if end <= start:
        return None, "no steady window: a stream ended before the last one had its first token"
    tokens = sum(
        count
        for record in live
        for time, count in zip(record.token_times_s, record.token_counts, strict=True)
        if start < time <= end
    )
    return Window(start, end, tokens), ""


def combined_prefill_rate(records: Sequence[RequestRecord]) -> float | None:
    """Prompt tokens of all answered requests / (time from the release until the last of them got its first token)."""
    answered = [r for r in records if r.status == "ok" and r.first_token_s is not None and r.prompt_tokens is not None]
    releases = [r.sent_s for r in answered if r.sent_s is not None]
    if not releases:
        return None
    elapsed = max(r.first_token_s for r in answered if r.first_token_s is not None) - min(releases)
    return sum(r.prompt_tokens or 0 for r in answered) / elapsed if elapsed > 0 else None


def most_in_flight(records: Sequence[RequestRecord]) -> int:
    """Most requests that were being answered at one moment: between first and last token."""
    changes = [(r.first_token_s, 1) for r in records if r.first_token_s is not None]
    changes += [(r.last_token_s, -1) for r in records if r.first_token_s is not None and r.last_token_s is not None]
    running = most = 0
    for _, change in sorted(changes, key=lambda c: (c[0], -c[1])):
        running += change
        most = max(most, running)
    return most


# -------------------------------------------------------------------------------------------- energy and limits


def wh_per_1k_tokens(energy_j: float | None, tokens: int) -> float | None:
    """Watt-hours per 1,000 tokens from the joules of a window and the tokens made in it."""
    if energy_j is None or tokens <= 0:
        return None
    return energy_j / 3600 / tokens * 1000


@dataclass(frozen=True)
class Machine:
    """Measured rates of the hardware under test: bytes copied (read plus written) and multiply-adds x 2, a second.

    `stages`: over how many devices of that kind the model is spread.
    """

    bandwidth_bytes_s: float | None = None
    matrix_flop_s: float | None = None
    stages: int = 1


@dataclass(frozen=True)
class StepCost:
    """What a model costs: bytes of weights a step reads, cache bytes a token, state bytes a request, parameters."""

    weight_bytes: int | None = None
    cache_bytes_per_token: int = 0
    state_bytes_per_request: int = 0
    active_parameters: int | None = None


def decode_limit(machine: Machine, cost: StepCost, streams: int, context_tokens: float) -> float | None:
    """Tokens per second that memory (or, where it is less, the matrix rate) allows N streams at a context.

    A step reads the weights once and the cache of every stream. Stages help with the cache and the arithmetic, which
    several groups of streams can spread over them, but not with the weights: each group reads all of them.
    """
    if machine.bandwidth_bytes_s is None or cost.weight_bytes is None:
        return None
    cache = streams * (context_tokens * cost.cache_bytes_per_token + cost.state_bytes_per_request)
    memory_s = (cost.weight_bytes + cache / machine.stages) / machine.bandwidth_bytes_s
    return streams / max(memory_s, _matrix_seconds(machine, cost, streams))


def prefill_limit(machine: Machine, cost: StepCost, prompt_tokens: int) -> float | None:
    """Prompt tokens per second that the matrix rate (or, where it is less, memory) allows `prompt_tokens` in all."""
    if machine.bandwidth_bytes_s is None or cost.weight_bytes is None:
        return None
    memory_s = cost.weight_bytes / machine.bandwidth_bytes_s
    return prompt_tokens / max(memory_s, _matrix_seconds(machine, cost, prompt_tokens))


def _matrix_seconds(machine: Machine, cost: StepCost, tokens: int) -> float:
    if machine.matrix_flop_s is None or cost.active_parameters is None:
        return 0.0
    return 2.0 * cost.active_parameters * tokens / (machine.matrix_flop_s * machine.stages)
