"""Energy of a window, from literal samples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.power.window import Sample, counter_energy, integrated_energy


def samples(*points: tuple[float, float | None], what: str = "energy_j") -> list[Sample]:
    return [Sample(t, "nvml", "0", **{what: value}) for t, value in points]


def steps(update_s: float, watts: float, until: float, poll_s: float = 0.02) -> list[Sample]:
    """A counter that is polled every poll_s and moves every update_s."""
    polls = [i * poll_s for i in range(round(until / poll_s) + 1)]
    return samples(*((t, math.floor(t / update_s + 1e-9) * update_s * watts) for t in polls))


def test_counter_is_interpolated_between_its_edges():
    # Edges at 1, 2, 3, 4 s with 100, 200, 500, 600 J: from 1.5 s (150 J) to 3.5 s (550 J).
    series = samples((0, 0.0), (1, 100.0), (1.5, 100.0), (2, 200.0), (3, 500.0), (4, 600.0))
    assert counter_energy(series, 1.5, 3.5).joules == pytest.approx(400.0)


def test_stale_value_before_an_edge_is_not_read_as_current():
    # 100 W, updates each second, polled each 20 ms: 2.5 s to 12.5 s is 1,000 J, although the counter shows 200 at 2.5.
    assert counter_energy(steps(1.0, 100.0, 15.0), 2.5, 12.25).joules == pytest.approx(975.0)


def test_window_that_starts_on_an_edge():
    assert counter_energy(samples((0, 0.0), (1, 50.0), (2, 90.0), (3, 130.0)), 1.0, 2.0).joules == 40.0


def test_short_window_is_marked_and_long_one_is_not():
    short = counter_energy(steps(0.1, 300.0, 10.0), 2.0, 2.5)
    assert short.joules == pytest.approx(150.0, abs=6.1)
    assert short.notes == ("the window is short for the energy counter's resolution",)
    assert counter_energy(steps(0.1, 300.0, 10.0), 1.03, 9.01).notes == ()


def test_frozen_counter_gives_no_figure():
    figure = counter_energy(samples((0, 7.0), (1, 7.0), (2, 7.0), (3, 7.0)), 0.5, 2.5)
    assert figure.joules is None and figure.notes == ("the energy counter did not move",)


def test_missing_counter_gives_no_figure():
    figure = counter_energy(samples((0, None), (1, None), (2, None)), 0.5, 1.5)
    assert figure.joules is None and figure.notes == ("no energy counter",)


def test_reset_inside_the_window_gives_no_figure():
    series = samples((0, 100.0), (1, 200.0), (2, 300.0), (3, 0.0), (4, 100.0), (5, 200.0))
    assert counter_energy(series, 1.5, 4.5).notes == ("the energy counter was reset",)
    assert counter_energy(series, 1.0, 2.0).joules == 100.0
    assert counter_energy(series, 3.0, 4.5).joules == 150.0


@pytest.mark.parametrize(("t0", "t1", "why"), [(0.2, 2.5, "before the window"), (1.5, 9.0, "after the window")])
def test_window_that_the_edges_do_not_enclose(t0, t1, why):
    figure = counter_energy(samples((0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)), t0, t1)
    assert figure.joules is None and why in figure.notes[0]


def test_counter_survives_a_gap_in_the_readings():
    series = samples((0, 0.0), (1, 100.0), (2, None), (3, None), (4, 400.0), (5, 500.0))
    assert counter_energy(series, 1.0, 5.0).joules == 400.0


def test_trapezoid_with_interpolated_ends():
    # 0 to 400 W in 4 s: between 1 and 3 s the mean is 200 W.
    series = samples((0, 0.0), (2, 200.0), (4, 400.0), what="watts")
    assert integrated_energy(series, 1.0, 3.0, max_gap_s=5).joules == pytest.approx(400.0)


def test_small_gap_is_named_and_large_gap_refused():
    dense = [(i * 0.1, 100.0) for i in range(101)]
    small = samples(*(p for p in dense if not 4.05 < p[0] < 4.75), what="watts")
    figure = integrated_energy(small, 0.0, 10.0, max_gap_s=0.5)
    assert figure.joules == pytest.approx(1000.0) and figure.notes == ("no power samples for 0.80 s",)
    large = samples(*(p for p in dense if not 4.05 < p[0] < 6.05), what="watts")
    figure = integrated_energy(large, 0.0, 10.0, max_gap_s=0.5)
    assert figure.joules is None and figure.notes == ("no power samples for 2.10 s of the window's 10.00 s",)


def test_samples_that_end_before_the_window_does():
    series = samples(*((i * 0.1, 100.0) for i in range(51)), what="watts")
    assert integrated_energy(series, 0.0, 10.0, max_gap_s=0.5).joules is None
    assert integrated_energy(series, 7.0, 8.0, max_gap_s=0.5).joules is None
    assert integrated_energy([], 0.0, 1.0, max_gap_s=0.5).notes == ("no power samples before or after the window",)


@given(
    watts=st.floats(1, 1000),
    update_s=st.sampled_from([0.02, 0.1, 0.25]),
    t0=st.floats(0.6, 5),
    length=st.floats(1, 10),
)
def test_constant_power_is_recovered_whatever_the_window(watts, update_s, t0, length):
    series = steps(update_s, watts, 16.0)
    # An edge is seen up to one poll (20 ms) late at either end.
    assert counter_energy(series, t0, t0 + length).joules == pytest.approx(watts * length, abs=watts * 0.0401)
    flat = samples(*((s.time_s, watts) for s in series), what="watts")
    assert integrated_energy(flat, t0, t0 + length, 0.5).joules == pytest.approx(watts * length)
