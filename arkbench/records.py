"""What is stored of a request, a cell and a run, and the readers and writers of those files.

The names of files, keys and columns are a contract (docs/contracts.md); nothing here computes a figure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "failed", "refused", "timeout", "cancelled"]

REQUEST_KEYS = (
    "scenario", "variant", "cell", "repetition", "request", "scheduled_s", "sent_s", "first_token_s", "last_token_s",
    "token_times_s", "token_counts", "prompt_tokens", "cached_tokens", "output_tokens", "status", "error",
)  # fmt: skip

CELL_COLUMNS = (
    "scenario", "variant", "workload", "model", "cell", "repetition", "status", "streams", "context_tokens", "at_once",
    "prompt_tokens", "output_tokens", "requests_ok", "requests_failed", "requests_refused", "requests_timeout",
    "decode_tok_s", "stream_tok_s", "prefill_tok_s", "ttft_p50_s", "ttft_max_s", "tpot_p50_s", "itl_p50_s",
    "itl_p99_s", "cached_tokens", "energy_j", "wh_per_1k_tokens", "idle_w", "limit_tok_s", "limit_fraction",
    "output_hash", "valid", "reason", "duration_s",
)  # fmt: skip

VERDICT_COLUMNS = ("id", "note", "statement", "published", "unit", "measured", "spread", "verdict", "reason")


@dataclass
class RequestRecord:
    """One line of requests.jsonl. Times are seconds on one monotonic clock since the run began.

    `token_times_s[i]` is when the i-th piece arrived, `token_counts[i]` how many tokens it held. None: not known
    (an endpoint that does not report cached tokens) or did not happen (no first token).
    """

    scenario: str
    variant: str
    cell: str
    repetition: int
    request: int
    scheduled_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    status: Status = "ok"
    error: str | None = None
