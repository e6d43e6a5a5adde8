"""Energy of a time window from power samples and cumulative counters: pure functions, no device is touched here.

All times are seconds of time.monotonic(), power is in watts, energy in joules. What cannot be told from the samples is
None with a note that says why, never 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

COUNTER_SHARE_LIMIT = 0.1
"""Largest part of a window that may lie between two counter updates before the figure is marked as too short."""
SHORT_WINDOW = "the window is short for the energy counter's resolution"
"""The note of a figure that the counter's steps blur."""
GAP_SHARE_LIMIT = 0.1
"""Largest part of a window that may lack samples before the integral is refused."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one device; the columns of power.csv.

    `energy_j` is the device's own counter since the meter started. `throttle` names the reasons, joined with "+";
    None: not known, "": none. `error` says why the reading failed (then every figure is None).
    """

    time_s: float
    source: str
    device: str
    watts: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    temperature_c: float | None = None
    power_limit_w: float | None = None
    throttle: str | None = None
    error: str = ""


POWER_COLUMNS = (
    "time_s", "source", "device", "watts", "energy_j", "sm_clock_mhz", "mem_clock_mhz", "temperature_c",
    "power_limit_w", "throttle",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """An energy in joules, or None, and what a reader must know about it."""

    joules: float | None
    notes: tuple[str, ...] = ()


def counter_energy(samples: Sequence[Sample], t0: float, t1: float) -> Figure:
    """Energy between t0 and t1 by the device's counter, read at its own update edges.

    A counter moves in steps (NVML: about every 100 ms), so its value between two steps is old. Only the moments at
    which it was seen to change are used, and the value at t0 and t1 is interpolated between the edges around them.
    """
    known = [s for s in samples if s.energy_j is not None]
    edges = [(b.time_s, b.energy_j) for a, b in pairwise(known) if b.energy_j != a.energy_j]
    if not edges:
        return Figure(None, ("the energy counter did not move" if known else "no energy counter",))
    times = [t for t, _ in edges]
    first, last = bisect_right(times, t0) - 1, bisect_left(times, t1)
    if first < 0:
        return Figure(None, ("the energy counter was not seen to update before the window",))
    if last == len(edges):
        return Figure(None, ("the energy counter did not update after the window",))
    inside = edges[first : last + 1]
    if _counter_fell(known, inside[0][0], inside[-1][0]):
        return Figure(None, ("the energy counter was reset",))
    joules = _interpolate(inside, t1) - _interpolate(inside, t0)
    straddling = (inside[1][0] - inside[0][0]) + (inside[-1][0] - inside[-2][0])
    if straddling > COUNTER_SHARE_LIMIT * (t1 - t0):
        return Figure(joules, (SHORT_WINDOW,))
    return Figure(joules)


def _counter_fell(known: Sequence[Sample], start: float, end: float) -> bool:
    values = [s.energy_j for s in known if start <= s.time_s <= end]
    return any(b < a for a, b in pairwise(values))


def _interpolate(points: Sequence[tuple[float, float]], t: float) -> float:
    """Value at t on the polyline through points (sorted by time, t within them)."""
    i = min(max(bisect_right(points, t, key=lambda p: p[0]), 1), len(points) - 1)
    (ta, a), (tb, b) = points[i - 1], points[i]
    return a + (b - a) * (t - ta) / (tb - ta)


def integrated_energy(samples: Sequence[Sample], t0: float, t1: float, max_gap_s: float) -> Figure:
    """Energy between t0 and t1 by the trapezoid rule over the power samples.

    Spans longer than max_gap_s without a sample are named; when they make up more than a tenth of the window, or the
    samples do not reach beyond both ends, there is no figure.
    """
    points = [(s.time_s, s.watts) for s in samples if s.watts is not None]
    first = bisect_right(points, t0, key=lambda p: p[0]) - 1
    last = bisect_left(points, t1, key=lambda p: p[0])
    if first < 0 or last == len(points):
        return Figure(None, ("no power samples before or after the window",))
    line = points[first : last + 1]
    gaps = [min(b[0], t1) - max(a[0], t0) for a, b in pairwise(line) if b[0] - a[0] > max_gap_s]
    if sum(gaps) > GAP_SHARE_LIMIT * (t1 - t0):
        return Figure(None, (f"no power samples for {sum(gaps):.2f} s of the window's {t1 - t0:.2f} s",))
    area = sum(_area(a, b, t0, t1) for a, b in pairwise(line))
    return Figure(area, (f"no power samples for {max(gaps):.2f} s",) if gaps else ())


def _area(a: tuple[float, float], b: tuple[float, float], t0: float, t1: float) -> float:
    """Trapezoid under the segment a-b, clipped to [t0, t1]."""
    left, right = max(a[0], t0), min(b[0], t1)
    if right <= left:
        return 0.0
    slope = (b[1] - a[1]) / (b[0] - a[0])
    return (right - left) * (a[1] + slope * ((left + right) / 2 - a[0]))
