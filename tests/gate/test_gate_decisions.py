"""The gate's decisions on literal figures, and their error rates by simulation of the very same code."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.gate import (
    ALL_PAIRS,
    METRICS,
    PAIRS,
    CellKey,
    GateResult,
    Row,
    judge_equal,
    judge_memory,
    judge_pairs,
    judge_requests,
    judge_stored,
    needs_more,
)

SPEED, TPOT = METRICS[0], METRICS[2]
KEY = CellKey("quick", "best", "m", "c")
FLOOR = 0.025


def judge(values: list[float], floor: float = FLOOR):
    return judge_pairs({"x": values}, {"x": floor}, final=len(values) > PAIRS)["x"]


def test_worsening_is_positive_for_slower_and_dearer():
    assert SPEED.worsening(1000.0, 950.0) == pytest.approx(0.05129, abs=1e-5)
    assert TPOT.worsening(0.020, 0.021) == pytest.approx(0.04879, abs=1e-5)
    assert SPEED.worsening(950.0, 1000.0) == pytest.approx(-0.05129, abs=1e-5)


def test_floor_is_no_finer_than_the_grain():
    ttft = METRICS[3]
    assert ttft.floor_at(0.010, 0.03) == pytest.approx(math.log(1.1))
    assert ttft.floor_at(0.500, 0.03) == 0.03 and SPEED.floor_at(5.0, 0.025) == 0.025


def test_first_look():
    assert not needs_more([0.001, -0.002, 0.0, 0.003, -0.001], FLOOR)
    assert not needs_more([-0.05, -0.04, -0.06, -0.05, -0.05], FLOOR)
    assert needs_more([0.05, 0.04, 0.06, 0.05, 0.05], FLOOR)  # a suspect
    assert needs_more([0.011, 0.012, 0.011, 0.013, 0.011], FLOOR)  # a median above 1%
    assert needs_more([0.1, -0.1, 0.08, -0.09, 0.0], FLOOR)  # too noisy to pass
    assert needs_more([0.0, 0.0, 0.0, 0.0], FLOOR)  # too few


def test_five_pairs_never_make_a_regression():
    assert judge([0.5, 0.51, 0.5, 0.49, 0.5]).state == "inconclusive"


def test_ten_pairs():
    clear = [0.05, 0.04, 0.06, 0.05, 0.05] * 2
    found = judge(clear)
    assert (found.state, found.worsening, found.pairs) == ("regression", 0.05, 10) and found.p_value < 1e-6
    assert judge([0.0, 0.01, -0.01, 0.005, -0.005] * 2).state == "pass"
    assert judge([-0.05] * 10).state == "pass"
    small = judge([0.015, 0.014, 0.016, 0.015, 0.015] * 2)
    assert (small.state, small.reason) == ("pass", "worse, but below the floor")
    unsure = judge([0.2, -0.15, 0.05, 0.04, 0.03] * 2)
    assert unsure.state == "inconclusive" and "not surely" in unsure.reason
    noisy = judge([0.1, -0.1, 0.1, -0.1, 0.02] * 2)
    assert noisy.state == "inconclusive" and "too noisy" in noisy.reason


def test_one_outlier_is_no_regression():
    assert judge([0.0, 0.001, -0.001, 0.002, 0.0, 0.001, -0.002, 0.0, 0.001, 0.12]).state != "regression"


def test_too_few_pairs_are_invalid():
    assert judge([0.0] * 4).state == "invalid" and judge([]).state == "invalid"
    assert judge([]).reason == "0 usable pairs of at least 5"


def test_holm_over_cells_protects_the_family():
    # One cell alone at p = 0.004 is a regression; among a hundred clean ones it is not.
    borderline = [0.03, 0.06, 0.027, 0.026, 0.10, 0.03, 0.026, -0.03, 0.03, 0.06]
    assert 0.001 < judge(borderline).p_value < 0.01 and judge(borderline).state == "regression"
    clean = {f"c{i}": [0.001, -0.001, 0.0, 0.001, -0.001] * 2 for i in range(100)}
    everything = clean | {"x": borderline}
    states = judge_pairs(everything, dict.fromkeys(everything, FLOOR), final=True)
    assert states["x"].state == "inconclusive" and states["c3"].state == "pass"


def test_stored_comparison():
    base = [100.0, 101.0, 99.0]
    assert judge_stored(SPEED, base, [98.0, 97.0, 99.0], 0.08).state == "pass"
    assert judge_stored(SPEED, base, [93.0, 92.5, 93.5], 0.08).state == "pass"
    found = judge_stored(SPEED, base, [80.0, 81.0, 79.0], 0.08)
    assert found.state == "regression" and found.worsening == pytest.approx(math.log(100 / 80))
    assert judge_stored(SPEED, base, [130.0, 131.0, 129.0], 0.08).state == "pass"
    overlap = judge_stored(SPEED, [100.0, 89.0, 101.0], [90.0, 89.5, 91.0], 0.08)
    assert overlap.state == "inconclusive" and "overlap" in overlap.reason
    noisy = judge_stored(SPEED, base, [100.0, 70.0, 101.0], 0.08)
    assert noisy.state == "inconclusive" and noisy.reason == "repetitions differ by 44%"


def test_stored_comparison_of_one_repetition_needs_more():
    assert judge_stored(SPEED, [100.0], [95.0], 0.08).state == "pass"
    assert judge_stored(SPEED, [100.0], [90.5], 0.08).state == "inconclusive"
    assert judge_stored(SPEED, [100.0], [80.0], 0.08).state == "regression"
    assert judge_stored(TPOT, [0.010], [0.013], 0.08).state == "regression"


def test_exact_checks():
    assert judge_requests(0, 0, 0, 0).state == "pass"
    assert judge_requests(0, 1, 0, 0).state == "regression"
    assert judge_requests(2, 2, 0, 0).state == "invalid"
    assert judge_requests(2, 0, 0, 0).state == "pass"
    assert judge_requests(0, 0, 0, 3).state == "regression"
    assert judge_requests(0, 0, 5, 9).state == "pass"
    assert judge_equal({1: "a", 2: "b"}, {1: "a", 2: "b", 3: "c"}, "hashes").state == "pass"
    assert judge_equal({1: "a"}, {1: "b"}, "hashes").reason == "hashes differ in 1 of 1"
    assert judge_equal({1: "a"}, {2: "a"}, "hashes").state == "invalid"
    assert judge_equal({}, {}, "hashes").state == "invalid"
    gib = 2**30
    assert judge_memory(10 * gib, 10 * gib + 100 * 2**20).state == "pass"
    assert judge_memory(10 * gib, 11 * gib).state == "regression"
    assert judge_memory(10 * gib, 5 * gib).state == "pass"


@pytest.mark.parametrize(
    ("states", "state", "code"),
    [
        (["pass", "pass"], "pass", 0),
        (["pass", "regression", "invalid"], "regression", 1),
        (["pass", "invalid", "inconclusive"], "invalid", 2),
        (["pass", "inconclusive"], "inconclusive", 2),
        ([], "invalid", 2),
    ],
)
def test_exit_codes(states, state, code):
    result = GateResult("t", tuple(Row(KEY, "decode_tok_s", s) for s in states))
    assert (result.state, result.exit_code) == (state, code)
    assert GateResult("t", result.rows, problem="broken").exit_code == 2


@given(st.lists(st.floats(-0.5, 0.5), min_size=0, max_size=10))
def test_every_input_has_a_state_and_better_is_never_a_regression(values):
    assert judge([-abs(v) for v in values]).state != "regression"
    assert judge(values).state in ("pass", "regression", "inconclusive", "invalid")


# ------------------------------------------------------------------------------------------------- simulation


def noisy_differences(
    rng: np.random.Generator, trials: int, cells: int, slowdown: float, run: float, session: float, shared: float
) -> np.ndarray:
    """Paired worsenings [trials, cells, ALL_PAIRS] of runs with noise of their own and of the session.

    A session's state is an AR(1) walk over the runs in ABBA order with correlation `shared` between neighbours (1: the
    same for both runs of a pair), common to all cells; one run in 25 is 4% slower for no reason. The slowdown is in
    the first cell alone.
    """
    runs = 2 * ALL_PAIRS
    walk = np.empty((trials, runs))
    walk[:, 0] = rng.normal(0, session, trials)
    for i in range(1, runs):
        within_pair = i % 2 == 1
        keep = 1.0 if shared == 1.0 and within_pair else min(shared, 0.9)
        walk[:, i] = keep * walk[:, i - 1] + math.sqrt(1 - keep**2) * rng.normal(0, session, trials)
    noise = rng.normal(0, run, (trials, cells, runs)) + 0.04 * (rng.random((trials, cells, runs)) < 0.04)
    times = (noise + walk[:, None, :]).reshape(trials, cells, ALL_PAIRS, 2)
    first_is_base = np.arange(ALL_PAIRS) % 2 == 0
    base = np.where(first_is_base, times[..., 0], times[..., 1])
    head = np.where(first_is_base, times[..., 1], times[..., 0])
    differences = head - base
    differences[:, 0] += math.log1p(slowdown)
    return differences


def gate_state(differences: np.ndarray) -> str:
    """The state of a whole check, [cells, ALL_PAIRS], by the code that the command runs."""
    floors = dict.fromkeys(range(len(differences)), FLOOR)
    seen = {i: row[:PAIRS].tolist() for i, row in enumerate(differences)}
    more = any(needs_more(row, FLOOR) for row in seen.values())
    if more:
        seen = {i: row.tolist() for i, row in enumerate(differences)}
    states = {j.state for j in judge_pairs(seen, floors, final=more).values()}
    return next(s for s in ("regression", "invalid", "inconclusive", "pass") if s in states)


def rates(trials: int, cells: int, slowdown: float, run: float = 0.01, session: float = 0.02, shared: float = 1.0):
    rng = np.random.default_rng(20261130)
    differences = noisy_differences(rng, trials, cells, slowdown, run, session, shared)
    states = [gate_state(d) for d in differences]
    return {s: states.count(s) / trials for s in ("regression", "inconclusive", "pass")}


@pytest.mark.parametrize("cells", [1, 8])
@pytest.mark.parametrize("shared", [1.0, 0.9])
def test_at_most_one_false_alarm_in_a_hundred(cells, shared):
    found = rates(3000 // cells, cells, 0.0, shared=shared)
    assert found["regression"] <= 0.01 and found["pass"] >= 0.9


@pytest.mark.parametrize("cells", [1, 8])
def test_sessions_that_differ_from_run_to_run_raise_no_alarm_either(cells):
    assert rates(2000 // cells, cells, 0.0, shared=0.0)["regression"] <= 0.01


@pytest.mark.parametrize("shared", [1.0, 0.9])
def test_nine_of_ten_real_slowdowns_are_caught(shared):
    assert rates(1500, 1, 0.05, shared=shared)["regression"] >= 0.9
    assert rates(400, 8, 0.05, shared=shared)["regression"] >= 0.9


def test_a_lone_slowdown_is_caught_though_no_two_runs_share_their_session():
    assert rates(1000, 1, 0.05, shared=0.0)["regression"] >= 0.9


def test_noise_that_hides_a_slowdown_does_not_pass():
    # Each of the two looks lets a slowdown of two floors pass with a probability of at most 5%.
    assert rates(1000, 1, 0.05, run=0.05)["pass"] <= 0.1


def test_stored_comparison_has_few_false_alarms():
    rng = np.random.default_rng(7)
    trials = 4000
    sessions = rng.normal(0, 0.02, (trials, 2, 1))
    speeds = 100 * np.exp(-(sessions + rng.normal(0, 0.01, (trials, 2, 3))))
    states = [judge_stored(SPEED, b.tolist(), h.tolist(), SPEED.stored_floor).state for b, h in speeds]
    assert states.count("regression") / trials <= 0.01
