from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arkbench.report.figures import Figure, asides, number, show, significant


@pytest.mark.parametrize(
    ("value", "written"),
    [(1677.4, "1,677"), (87.42, "87.4"), (0.6404, "0.64"), (47.0, "47"), (3.21e-3, "0.00321"), (-3.5, "-3.50")],
)  # fmt: skip
def test_three_significant_digits(value: float, written: str) -> None:
    assert significant(value) == written


@pytest.mark.parametrize(
    ("value", "kind", "written"),
    [
        (2.469, "ratio", "2.47×"),
        (15.44, "ratio", "15.4×"),
        (44.6, "change", "+45 %"),
        (-2.36, "change", "-2.4 %"),
        (0.712, "percent", "71 %"),
        (0.0213, "percent", "2.1 %"),
        (603.4, "printed", "603.4"),
        (1048576.0, "integer", "1,048,576"),
        (None, "ratio", "—"),
    ],
)
def test_kinds(value: float | None, kind: str, written: str) -> None:
    assert show(value, kind) == written


@given(st.floats(min_value=1e-9, max_value=1e12))
def test_what_is_written_is_within_half_a_percent(value: float) -> None:
    assert float(significant(value).replace(",", "")) == pytest.approx(value, rel=0.00501)


@pytest.mark.parametrize("value", [None, "", "abc", float("nan"), math.inf, "-inf"])
def test_what_is_no_figure_is_none(value: object) -> None:
    assert number(value) is None


def test_asides() -> None:
    assert asides(Figure(5.0, 0.021, 0.31)) == "spread 2.1 % · 31 % of limit"
    assert asides(Figure(5.0, None, 0.04, at_least=True)) == "≥ 4.0 % of limit"
    assert asides(Figure(5.0)) == ""
