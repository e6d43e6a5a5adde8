"""Two runs side by side, cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arkbench.report.blocks import Column, Table
from arkbench.report.data import CELL_KEY, Run, load
from arkbench.report.figures import Figure, number

MEASURES = (
    ("decode_tok_s", "decode throughput", "tok/s"),
    ("prefill_tok_s", "prefill throughput", "tok/s"),
    ("ttft_p50_s", "TTFT, median", "s"),
    ("tpot_p50_s", "TPOT, median", "s"),
    ("wh_per_1k_tokens", "energy", "Wh per 1,000 tokens"),
)


def compare(run_a: Path, run_b: Path) -> list[Table]:
    """A table for each quantity that a cell of either run has: A, B, each with its spread, and B / A.

    A cell that only one run has stays in the table with a gap. FileNotFoundError: not a run folder.
    """
    a, b = load([run_a, run_b])
    keys = list(dict.fromkeys(_key(row) for run in (a, b) for row in run.summary.to_dict("records")))
    found = [{_key(row): row for row in run.summary.to_dict("records")} for run in (a, b)]
    tables = []
    for column, name, unit in MEASURES:
        rows = []
        for key in keys:
            pair = [_figure(run, held.get(key), column) for run, held in zip((a, b), found, strict=True)]
            if pair[0].value is None and pair[1].value is None:
                continue
            ratio = pair[1].value / pair[0].value if pair[0].value and pair[1].value is not None else None
            rows.append([*key, *pair, ratio])
        if rows:
            names = [Column(name) for name in CELL_KEY]
            sides = [Column(f"A: {a.label}", "number", "", unit), Column(f"B: {b.label}", "number", "", unit)]
            caption = f"{name[0].upper()}{name[1:]}"
            tables.append(Table(column.removesuffix("_s"), caption, [*names, *sides, Column("B / A", "ratio")], rows))
    return tables


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(row[column] for column in CELL_KEY)


def _figure(run: Run, row: dict[str, Any] | None, column: str) -> Figure:
    if row is None or number(row[column]) is None:
        return Figure(None)
    return run.figure(row, column)
