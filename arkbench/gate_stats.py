"""The few statistics that the gate needs: Student's t, its quantile, and Holm's correction. No dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, stdev


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function I_x(a, b) for a, b > 0 and 0 <= x <= 1 (DLMF 8.17)."""
    if not 0.0 <= x <= 1.0:
        raise ValueError(f"x = {x} is outside 0..1")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction below converges fast on the other side
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a * _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of DLMF 8.17.22, by the modified Lentz method."""
    tiny, c, d = 1e-300, 1.0, 0.0
    value = 1.0
    for i in range(400):
        m = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / ((1.0 + term * d) or tiny)
        c = (1.0 + term / c) or tiny
        step = c * d
        value *= step
        if i and abs(step - 1.0) < 1e-15:
            break
    return value - 1.0


def t_tail(t: float, freedom: int) -> float:
    """P(T > t) of Student's distribution with `freedom` degrees of freedom."""
    if math.isinf(t):
        return 0.0 if t > 0 else 1.0
    square = t * t
    if square < freedom:  # near 0 the other tail of the beta function keeps the digits
        half = 0.5 - 0.5 * incomplete_beta(0.5, freedom / 2, square / (freedom + square))
    else:
        half = 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square))
    return half if t >= 0 else 1.0 - half


@lru_cache(maxsize=256)
def t_quantile(p: float, freedom: int) -> float:
    """The t with P(T <= t) = p, for 0.5 <= p < 1, by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > 1.0 - p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1.0 - p else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Summary:
    """What is known of a sample's mean: `error` is its standard error (0 when all values are the same)."""

    count: int
    mean: float
    median: float
    error: float

    def lower(self, confidence: float) -> float:
        """The one-sided lower bound of the mean."""
        return self.mean - self.error * t_quantile(confidence, self.count - 1)

    def upper(self, confidence: float) -> float:
        """The one-sided upper bound of the mean."""
        return self.mean + self.error * t_quantile(confidence, self.count - 1)

    @property
    def p_positive(self) -> float:
        """The p-value of "the mean is at most 0": small when it is surely positive."""
        if self.error == 0.0:
            return 0.0 if self.mean > 0 else 1.0
        return t_tail(self.mean / self.error, self.count - 1)


def summarise(values: Sequence[float]) -> Summary:
    """Mean, median and standard error of at least two values."""
    return Summary(len(values), fmean(values), median(values), stdev(values) / math.sqrt(len(values)))


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses are rejected by Holm's step-down rule at a family-wise error of `level`, in the given order."""
    rejected = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > level / (len(p_values) - rank):
            break
        rejected[i] = True
    return rejected
