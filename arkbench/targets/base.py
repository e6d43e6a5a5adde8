"""What a target is: something that answers planned requests and says what it saw.

The harness plans (`workloads.py`), a target sends and times (`bundled.py` in-process, `openai.py` over HTTP), the
harness records and computes. A target computes no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from arkbench.records import Status


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a cell: its prompt as token ids and how many tokens it must make (the end-of-text is ignored).

    `offset_s`: open loop only: when it is due after the release. `stream`: closed loop only: whose turn it is.
    """

    request: int
    prompt: Sequence[int]
    output_tokens: int
    offset_s: float = 0.0
    stream: int = 0


@dataclass(frozen=True)
class Load:
    """When which request is sent.

    "burst": all at the release, and each measured from it, however long the last takes to leave. "together": all at the
    release, each measured from its own sending. "closed": every stream sends its next request when its last has ended,
    and none after `duration_s`. "open": each at release + offset_s, whatever the target does.
    A request with no first token after `first_token_timeout_s` is a timeout; `grace_s` after the last release or the
    end of `duration_s` what still runs is cut (status "cancelled") and the report says so.
    """

    requests: Sequence[PlannedRequest]
    mode: Literal["burst", "together", "closed", "open"] = "together"
    duration_s: float | None = None
    first_token_timeout_s: float = 90.0
    grace_s: float = 120.0


@dataclass
class Answer:
    """What a target saw of one request. Times are time.monotonic() seconds; the runner makes them relative.

    `tokens`: the token ids when the target knows them, else None; `text`: when it knows only text. They feed the
    output hash and are not stored.
    """

    request: int
    scheduled: float
    sent: float | None = None
    piece_times: list[float] = field(default_factory=list)
    piece_counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    status: Status = "ok"
    error: str | None = None
    tokens: list[int] | None = None
    text: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """What a target says about a whole load: whether the client was the limit, and anything worth a note.

    `client_lag_p99_s`: the event loop's lag (None in-process). `resident_requests`: how many requests its cache held,
    on average over the steps during which others waited for room (None: none waited, or it cannot know).
    `valid` False with a reason makes the cell invalid. `timeline`: of a model over several stages, {stage, kind,
    request, piece, start_s, end_s} for each piece on each stage, seconds of time.monotonic().
    """

    valid: bool = True
    reason: str = ""
    client_lag_p99_s: float | None = None
    resident_requests: float | None = None
    notes: tuple[str, ...] = ()
    timeline: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class TargetInfo:
    """What a target knows about itself; an endpoint leaves empty what it does not say.

    `step_weight_bytes`: bytes of weights one decode step reads; `cache_bytes_per_token`, `state_bytes_per_request`
    likewise: the harness computes the memory limit from them. `start_seconds`: named parts of the start-up time.
    `loaded`: whether this start loaded the model, or only turned the switches of a loaded one.
    """

    name: str
    model: str
    device: str = ""
    in_process: bool = False
    step_weight_bytes: int | None = None
    cache_bytes_per_token: int | None = None
    state_bytes_per_request: int | None = None
    active_parameters: int | None = None
    vocab: int | None = None
    geometry: dict | None = None
    start_seconds: dict[str, float] = field(default_factory=dict)
    loaded: bool = True
    notes: tuple[str, ...] = ()


class TargetError(Exception):
    """The target cannot be used: one line for the user, with the mend."""


class Target(Protocol):
    """Used from one thread. `start` may be called again with other switches (a new variant)."""

    def start(self, switches: dict[str, str], max_streams: int, max_tokens: int, cache_tokens: int) -> TargetInfo:
        """Readies the target for streams of at most max_tokens (prompt + output); raises TargetError."""
        ...

    def run(self, load: Load, on_answer: Callable[[Answer], None]) -> LoadReport:
        """Sends a load; on_answer is called as each request ends, in any order, from the caller's thread.

        KeyboardInterrupt passes through after what runs has been cancelled and handed to on_answer.
        """
        ...

    def next_token(self, prompt: Sequence[int]) -> Mapping[int, float] | None:
        """The log probability of every token that may follow, None where the target does not tell; TargetError."""
        ...

    def close(self) -> None: ...
