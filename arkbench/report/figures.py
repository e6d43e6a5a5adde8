"""How a figure is held and how it is written: for people, and for other programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MISSING = "—"


@dataclass(frozen=True)
class Figure:
    """A figure with what belongs beside it. Fractions are 0 to 1 (a limit fraction may pass 1).

    `spread`: (max - min) / median over the repetitions. `limit`: fraction of what the hardware allows; `at_least`
    says that the true fraction is higher. `mark`: why the figure is not to be trusted.
    """

    value: float | None
    spread: float | None = None
    limit: float | None = None
    at_least: bool = False
    mark: str = ""


class Printed(float):
    """A published figure that is shown as it was printed, `text`: 1.20 stays 1.20, and 9.9 is not 9.90."""

    text: str

    def __new__(cls, text: str) -> Printed:
        figure = super().__new__(cls, text)
        figure.text = text
        return figure


def number(value: Any) -> float | None:
    """A finite float, or None for everything that is not one (empty, NaN, infinite, words)."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if math.isfinite(result) else None


def text(value: Any) -> str:
    """A string; empty for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value)


def show(value: float | None, kind: str = "number") -> str:
    """A number for people. Kinds: number, printed (as it stands in its source), integer, ratio, change, percent."""
    if value is None:
        return MISSING
    if kind == "printed":
        return f"{value:,.10g}"
    if kind == "integer":
        return f"{value:,.0f}"
    if kind == "ratio":
        return f"{_printed(value) or format(value, '.2f' if abs(value) < 10 else '.1f')}×"
    if kind == "change" and _printed(value):
        return f"{'+' if value > 0 else ''}{_printed(value)} %"
    if kind == "change":
        return f"{value:+.0f} %" if abs(value) >= 10 else f"{value:+.1f} %"
    if kind == "percent":
        return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.1f} %"
    return significant(value)


def _printed(value: float) -> str:
    return value.text if isinstance(value, Printed) else ""


def significant(value: float, digits: int = 3) -> str:
    """Three significant digits, thousands separated, never an exponent: 1,677 · 87.4 · 0.64; whole numbers whole."""
    if value == round(value):
        return f"{value:,.0f}"
    magnitude = math.floor(math.log10(abs(value)))
    decimals = max(0, digits - 1 - magnitude)
    written = f"{value:,.{decimals}f}"
    return written.rstrip("0").rstrip(".") if "." in written and decimals > 2 else written


def asides(figure: Figure) -> str:
    """What stands small beside a figure: its spread and its fraction of the limit."""
    parts = []
    if figure.spread is not None:
        parts.append(f"spread {show(figure.spread, 'percent')}")
    if figure.limit is not None:
        parts.append(f"{'≥ ' if figure.at_least else ''}{show(figure.limit, 'percent')} of limit")
    return " · ".join(parts)
