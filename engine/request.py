"""What goes into the engine and what comes out: requests, sampling parameters, token events. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["length", "stop", "cancelled", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `seed` None draws one from the engine's. The noise depends on (seed, position) alone, never on the batch.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True)
class Request:
    id: str
    prompt: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class TokenEvent:
    """Tokens of one request that have reached the host. `time_s`: time.monotonic() when they did.

    `finished` is set on the last event of a request; `cached_tokens` (prompt tokens not computed again) on the first.
    `logprobs[i]`: for token i its own log probability and those of the best `SamplingParams.logprobs` tokens.
    """

    request_id: str
    tokens: tuple[int, ...]
    time_s: float
    finished: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: tuple[tuple[float, dict[int, float]], ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class EngineInfo:
    """What the engine is, for reports and limits. Bytes are what one decode step must read."""

    model: str
    device: str
    weight_bytes: int
    step_weight_bytes: int
    cache_bytes_per_token: int
    state_bytes_per_request: int
    cache_tokens: int
    quantized: str
    start_seconds: dict[str, float]
    notes: tuple[str, ...] = ()
