"""The measurements of single kernels, which are no cells of requests: whatever the kernel bench wrote of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from arkbench.report.blocks import Block, Column, Table
from arkbench.report.charts import BarPanel, Bars, BarSeries
from arkbench.report.data import Run
from arkbench.report.figures import number, text


def kernel_blocks(scenario: str, runs: Sequence[Run]) -> list[Block]:
    """A table a part (products, attention, small) with the median of each figure, and their fractions of the limit."""
    parts: dict[str, list[tuple[Run, list[Mapping[str, Any]]]]] = {}
    for run in runs:
        for cell in dict.fromkeys(text(d.get("cell")) for d in run.details if d.get("scenario") == scenario):
            held = [d["kernels"] for d in run.details if d.get("cell") == cell and d.get("kernels")]
            if held:
                parts.setdefault(cell, []).append((run, _medians(held)))
    blocks: list[Block] = []
    for part, measured in parts.items():
        blocks.append(_table(scenario, part, measured))
        blocks += _chart(scenario, part, measured)
    return blocks


def _medians(repetitions: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Row by row the median over repetitions of what is a figure and differs; the rest from the first."""
    rows = []
    for index, first in enumerate(repetitions[0]):
        same = [rows[index] for rows in repetitions if index < len(rows)]
        row = dict(first)
        for key, value in first.items():
            values = [v for other in same if (v := number(other.get(key))) is not None]
            if isinstance(value, float) and values:
                row[key] = median(values)
        rows.append(row)
    return rows


def _keys(measured: Sequence[tuple[Run, Sequence[Mapping[str, Any]]]]) -> list[str]:
    return list(dict.fromkeys(key for _, rows in measured for row in rows for key in row))


def _table(scenario: str, part: str, measured: Sequence[tuple[Run, Sequence[Mapping[str, Any]]]]) -> Table:
    keys = _keys(measured)
    rows = [(run, row) for run, held in measured for row in held]
    columns = [Column(key.replace("_", " "), _kind(key, [row.get(key) for _, row in rows])) for key in keys]
    several = len(measured) > 1
    columns += [Column("run")] if several else []
    written = [[_plain(row.get(key)) for key in keys] + ([run.label] if several else []) for run, row in rows]
    return Table(f"{scenario}-{part}", f"{part}: medians over the repetitions", columns, written)


def _kind(key: str, values: Sequence[Any]) -> str:
    known = [value for value in values if value is not None]
    if not known or not all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return "text"
    if "fraction" in key:
        return "percent"
    return "integer" if all(isinstance(value, int) for value in known) else "number"


def _plain(value: Any) -> Any:
    return value if value is None or (isinstance(value, int | float) and not isinstance(value, bool)) else text(value)


def _chart(scenario: str, part: str, measured: Sequence[tuple[Run, Sequence[Mapping[str, Any]]]]) -> list[Block]:
    """The fraction of the limit of each row, where there is one; a row is named by its words and whole numbers."""
    fraction = next((key for key in _keys(measured) if "fraction" in key), None)
    if fraction is None:
        return []
    panels = []
    for run, rows in measured:
        names = [
            " · ".join(
                f"{key} {value}" if isinstance(value, int) else value
                for key, value in row.items()
                if isinstance(value, str | int) and not isinstance(value, bool)
            )
            for row in rows
        ]
        panels.append(BarPanel(run.label, names, [BarSeries("measured", [number(row.get(fraction)) for row in rows])]))
    alt = f"Bars: fraction of the limit that each kernel of the part {part} reached; figures in the table beside it."
    title = f"{part}: fraction of the limit"
    key = f"{scenario}-{part}"
    return [Bars(key, title, alt, panels, "measured / limit", horizontal=True, kind="percent")]
