"""Charts as data. `draw.py` draws them; every point given here is drawn, and a missing one is drawn as missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from arkbench.report.style import Role

NO_BAR = math.nan


@dataclass(frozen=True)
class BarSeries:
    """`role`: `base` is drawn grey and hatched (what a figure is compared with), numbers are colours in order.

    A value of None is a bar that is missing (`missing` stands in its place), NaN one that the group does not have.
    """

    name: str
    values: Sequence[float | None]
    role: Role = 0
    missing: str = "not measured"


def is_no_bar(value: float | None) -> bool:
    return value is not None and math.isnan(value)


@dataclass(frozen=True)
class BarPanel:
    """Groups of bars on one scale. `ratios`: a line above each group (empty: none)."""

    title: str
    groups: Sequence[str]
    series: Sequence[BarSeries]
    ratios: Sequence[str] = ()


@dataclass(frozen=True)
class Bars:
    """Grouped bars in panels, each with a scale of its own (panels may come from different GPUs)."""

    key: str
    title: str
    alt: str
    panels: Sequence[BarPanel]
    value_label: str
    group_label: str = ""
    horizontal: bool = False
    kind: str = "number"

    def points(self) -> int:
        """How many figures the chart has, missing ones too."""
        return sum(not is_no_bar(value) for panel in self.panels for series in panel.series for value in series.values)

    def missing(self) -> int:
        """How many of them are missing."""
        return sum(value is None for panel in self.panels for series in panel.series for value in series.values)


@dataclass(frozen=True)
class Line:
    """`labels` stand beside the points; `role` as in BarSeries. `published`: drawn hollow and grey."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    labels: Sequence[str] = ()
    published: bool = False
    role: Role = 0


@dataclass(frozen=True)
class LinePanel:
    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Lines:
    """Lines over a quantity, in panels."""

    key: str
    title: str
    alt: str
    panels: Sequence[LinePanel]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False

    def points(self) -> int:
        return sum(len(line.x) for panel in self.panels for line in panel.lines)

    def missing(self) -> int:
        return sum(
            x is None or y is None
            for panel in self.panels
            for line in panel.lines
            for x, y in zip(line.x, line.y, strict=True)
        )


@dataclass(frozen=True)
class Span:
    """One piece of work of one stage; times in seconds since the first piece of its panel began."""

    stage: int
    request: int
    piece: int | None
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class TimelinePanel:
    title: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class Timeline:
    """Which stage worked on which piece when; all panels share one time scale."""

    key: str
    title: str
    alt: str
    panels: Sequence[TimelinePanel]

    def points(self) -> int:
        return sum(len(panel.spans) for panel in self.panels)

    def missing(self) -> int:
        return 0


Chart: TypeAlias = Bars | Lines | Timeline
