"""Student's t and Holm against published tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.gate_stats import holm, incomplete_beta, summarise, t_quantile, t_tail

# Critical values of Student's t as printed in statistical tables (one-sided confidence, degrees of freedom).
TABLE = {
    (0.95, 1): 6.314, (0.95, 2): 2.920, (0.95, 4): 2.132, (0.95, 9): 1.833, (0.95, 30): 1.697,
    (0.975, 1): 12.706, (0.975, 4): 2.776, (0.975, 9): 2.262, (0.975, 120): 1.980,
    (0.99, 1): 31.821, (0.99, 4): 3.747, (0.99, 9): 2.821, (0.99, 19): 2.539,
    (0.995, 4): 4.604, (0.995, 9): 3.250, (0.999, 4): 7.173, (0.999, 9): 4.297, (0.9995, 9): 4.781,
}  # fmt: skip


@pytest.mark.parametrize(("point", "value"), TABLE.items())
def test_quantiles_match_the_tables(point, value):
    assert t_quantile(*point) == pytest.approx(value, abs=6e-4)
    assert t_tail(value, point[1]) == pytest.approx(1 - point[0], rel=2e-3)


@given(t=st.floats(-50, 50))
def test_tail_against_closed_forms(t):
    assert t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-12)
    assert t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


@given(t=st.floats(0, 1e6), freedom=st.integers(1, 200))
def test_tails_are_symmetric_and_bounded(t, freedom):
    assert 0 <= t_tail(t, freedom) <= 0.5
    assert t_tail(t, freedom) + t_tail(-t, freedom) == pytest.approx(1)


def test_tail_far_out():
    assert t_tail(10.0, 9) == pytest.approx(1.79e-6, rel=0.02)
    assert t_tail(math.inf, 4) == 0 and t_tail(-math.inf, 4) == 1


@given(x=st.floats(0.01, 0.99), a=st.floats(0.5, 60), b=st.floats(0.5, 60))
def test_incomplete_beta_identities(x, a, b):
    assert incomplete_beta(a, 1.0, x) == pytest.approx(x**a, abs=1e-10)
    assert incomplete_beta(a, b, x) == pytest.approx(1 - incomplete_beta(b, a, 1 - x), abs=1e-9)


def test_incomplete_beta_literals():
    assert incomplete_beta(2, 3, 0.5) == pytest.approx(0.6875)  # 11/16, from the binomial sum
    assert incomplete_beta(5, 5, 0.25) == pytest.approx(12826 / 2**18)
    with pytest.raises(ValueError, match="outside"):
        incomplete_beta(1, 1, 1.5)


def test_summary_bounds():
    seen = summarise([0.04, 0.05, 0.06, 0.05, 0.05])
    assert seen.mean == pytest.approx(0.05) and seen.median == 0.05
    assert seen.error == pytest.approx(0.0031623, rel=1e-4)
    assert seen.lower(0.95) == pytest.approx(0.05 - 2.1318 * 0.0031623, rel=1e-4)
    assert seen.upper(0.95) == pytest.approx(0.05 + 2.1318 * 0.0031623, rel=1e-4)


def test_values_without_scatter():
    assert summarise([0.1] * 5).p_positive == 0
    assert summarise([0.0] * 5).p_positive == 1
    assert summarise([-0.1] * 5).p_positive == 1


def test_holm_steps_down():
    # 0.01/4 = 0.0025, 0.01/3 = 0.0033, 0.01/2 = 0.005: the third is above, so it and the last stay.
    assert holm([0.9, 0.002, 0.0051, 0.003], 0.01) == [False, True, False, True]
    assert holm([0.003, 0.004], 0.01) == [True, True]
    assert holm([0.006, 0.009], 0.01) == [False, False]
    assert holm([0.009], 0.01) == [True] and holm([], 0.01) == []
