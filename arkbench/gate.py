"""The regression gate's decisions: pure functions from figures to states.

A difference is a log ratio signed so that positive is worse: 0.05 is about 5% slower (or dearer). Paired runs are
judged in two looks: five pairs first; a cell that looks worse, or too noisy to tell, gets five more, and only then may
it be called a regression. Every (cell, metric) that is judged counts as one hypothesis of Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple, TypeVar

from arkbench.gate_stats import holm, summarise

State = Literal["pass", "regression", "inconclusive", "invalid"]
K = TypeVar("K", bound=Hashable)

PAIRS = 5
ALL_PAIRS = 2 * PAIRS
SUSPECT_CONFIDENCE = 0.95
FAMILY_ERROR = 0.01
"""Holm's level over all cells and metrics: the share of checks that may call a regression without one."""
LOOK_AGAIN = 0.01
"""A median worsening above this gets a second look, whatever the floor."""
VISIBLE = 2.0
"""A cell whose upper bound exceeds VISIBLE floors is too noisy for its silence to count as a pass."""
SINGLE_REPETITION = 1.5
"""Stored results of one repetition have no spread to look at: their floor is this many times wider."""


class CellKey(NamedTuple):
    """What names a cell in both runs."""

    scenario: str
    variant: str
    model: str
    cell: str

    def __str__(self) -> str:
        return " ".join(self)


@dataclass(frozen=True)
class Metric:
    """A column of cells.csv that is judged. Floors are the smallest worsening (log ratio) that counts.

    `paired_floor` is for alternating runs on one GPU, `stored_floor` for two runs at different times. `grain`: the
    smallest change in the column's own unit that means anything, whatever share of a small figure it is.
    """

    column: str
    higher_is_better: bool
    paired_floor: float
    stored_floor: float
    grain: float = 0.0

    def worsening(self, base: float, head: float) -> float:
        """ln(head / base), signed so that positive is worse; both must be positive."""
        change = math.log(head / base)
        return -change if self.higher_is_better else change

    def floor_at(self, base: float, floor: float) -> float:
        """The floor for a figure of about `base`: no finer than the grain."""
        return max(floor, math.log1p(self.grain / base))


METRICS = (
    Metric("decode_tok_s", True, 0.025, 0.08),
    Metric("prefill_tok_s", True, 0.025, 0.08),
    Metric("tpot_p50_s", False, 0.025, 0.08),
    Metric("ttft_p50_s", False, 0.03, 0.10, grain=0.001),
    Metric("wh_per_1k_tokens", False, 0.05, 0.10),
)


@dataclass(frozen=True)
class Judgement:
    """A state with what it rests on: the median worsening, the one-sided p-value, and a reason in words."""

    state: State
    worsening: float | None = None
    p_value: float | None = None
    pairs: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the gate's table: a cell and what was checked of it (a metric's column or an exact check)."""

    cell: CellKey
    check: str
    state: State
    base: float | None = None
    head: float | None = None
    worsening: float | None = None
    floor: float | None = None
    p_value: float | None = None
    pairs: int = 0
    reason: str = ""


@dataclass(frozen=True)
class GateResult:
    """The outcome of a check. `problem`: why nothing could be compared at all (then there are no rows)."""

    title: str
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str = ""
    counts: Mapping[State, int] = field(init=False)

    def __post_init__(self) -> None:
        states: tuple[State, ...] = ("regression", "invalid", "inconclusive", "pass")
        object.__setattr__(self, "counts", {s: sum(r.state == s for r in self.rows) for s in states})

    @property
    def state(self) -> State:
        """The worst state of all rows; a check without rows decided nothing and is invalid."""
        if self.problem or not self.rows:
            return "invalid"
        return next(s for s, count in self.counts.items() if count)

    @property
    def exit_code(self) -> int:
        """0 pass, 1 regression, 2 anything that is neither."""
        return {"pass": 0, "regression": 1}.get(self.state, 2)


def needs_more(differences: Sequence[float], floor: float) -> bool:
    """Whether the first look cannot let a cell pass: too few pairs, a suspect, a median above 1%, or too noisy."""
    if len(differences) < PAIRS:
        return True
    seen = summarise(differences)
    suspect = seen.lower(SUSPECT_CONFIDENCE) > 0 and seen.median > floor
    return suspect or seen.median > LOOK_AGAIN or seen.upper(SUSPECT_CONFIDENCE) > VISIBLE * floor


def judge_pairs(differences: Mapping[K, Sequence[float]], floors: Mapping[K, float], final: bool) -> dict[K, Judgement]:
    """States of all cells from their paired worsenings; `final`: all ten pairs were run (some may be unusable).

    A regression needs the final look, Holm's rejection at 1% over all that were judged, and a median above the floor.
    """
    judged = {k: summarise(d) for k, d in differences.items() if len(d) >= PAIRS}
    rejected = dict(zip(judged, holm([s.p_positive for s in judged.values()], FAMILY_ERROR), strict=True))
    result: dict[K, Judgement] = {}
    for key, values in differences.items():
        if key not in judged:
            why = f"{len(values)} usable pairs of at least {PAIRS}"
            result[key] = Judgement("invalid", pairs=len(values), reason=why)
            continue
        seen, floor = judged[key], floors[key]
        state, reason = _state(values, floor, final and rejected[key], final)
        result[key] = Judgement(state, seen.median, seen.p_positive, seen.count, reason)
    return result


def _state(values: Sequence[float], floor: float, rejected: bool, final: bool) -> tuple[State, str]:
    seen = summarise(values)
    if not final:
        return ("inconclusive", "needs more pairs") if needs_more(values, floor) else ("pass", "")
    if seen.median > floor:
        return ("regression", "") if rejected else ("inconclusive", "worse than the floor, but not surely")
    if seen.upper(SUSPECT_CONFIDENCE) > VISIBLE * floor:
        return "inconclusive", f"too noisy: a worsening of {VISIBLE * floor:.1%} cannot be excluded"
    return "pass", "worse, but below the floor" if rejected else ""


def judge_stored(metric: Metric, base: Sequence[float], head: Sequence[float], floor: float) -> Judgement:
    """A state from the repetitions of two separate runs.

    Nothing ties two sessions together, so the floor is wide, and repetitions that overlap, or scatter by more than two
    floors, are inconclusive.
    """
    worsening = metric.worsening(median(base), median(head))
    single = min(len(base), len(head)) < 2
    scatter = max(max(v) / min(v) - 1 for v in (base, head))
    if not single and scatter > VISIBLE * floor:
        return Judgement("inconclusive", worsening, reason=f"repetitions differ by {scatter:.0%}")
    if worsening <= floor:
        return Judgement("pass", worsening)
    if single:
        sure = worsening > SINGLE_REPETITION * floor
        reason = "" if sure else "one repetition only: run several to be sure"
        return Judgement("regression" if sure else "inconclusive", worsening, reason=reason)
    mildest = min(metric.worsening(b, h) for b in base for h in head)
    if mildest <= 0:
        return Judgement("inconclusive", worsening, reason="the repetitions of both runs overlap")
    return Judgement("regression", worsening)


MEMORY_SHARE, MEMORY_BYTES = 0.01, 16 * 2**20
"""Peak memory may grow by this share and this many bytes before it counts: an allocator's own grain."""


def judge_memory(base: int, head: int) -> Judgement:
    """Peak GPU memory in bytes."""
    grown = head > base * (1 + MEMORY_SHARE) + MEMORY_BYTES
    reason = f"peak memory grew from {base / 2**30:.2f} to {head / 2**30:.2f} GiB" if grown else ""
    return Judgement("regression" if grown else "pass", math.log(head / base), reason=reason)


def judge_requests(base_failed: int, head_failed: int, base_unanswered: int, head_unanswered: int) -> Judgement:
    """Failed requests, and requests that were refused or timed out.

    Head may fail none that base does not. Where base itself leaves requests unanswered (a scenario that probes the
    limit), their number depends on speed and is left to the metrics.
    """
    if head_failed > base_failed:
        return Judgement("regression", reason=f"{head_failed} failed requests, base {base_failed}")
    if head_unanswered and not base_unanswered:
        return Judgement("regression", reason=f"{head_unanswered} requests refused or timed out, base 0")
    if head_failed:
        return Judgement("invalid", reason=f"{head_failed} failed requests in head, {base_failed} in base")
    return Judgement("pass")


def judge_equal(base: Mapping[K, object], head: Mapping[K, object], what: str) -> Judgement:
    """Things that must be identical wherever both have them: output hashes by repetition, token counts by request."""
    common = base.keys() & head.keys()
    if not common:
        return Judgement("invalid", reason=f"no {what} in common")
    different = sum(base[k] != head[k] for k in common)
    if different:
        return Judgement("regression", reason=f"{what} differ in {different} of {len(common)}")
    return Judgement("pass")
