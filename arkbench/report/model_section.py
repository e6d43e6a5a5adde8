"""Scenarios that measure many models: a row and a group of bars for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arkbench.report.blocks import Block, Column, Table
from arkbench.report.charts import NO_BAR, BarPanel, Bars, BarSeries
from arkbench.report.data import Run, setting
from arkbench.report.figures import number

MANY_MODELS = 5
"""Models from which columns of their own would no longer fit a page."""

RATES = {"decode": "decode_tok_s", "sustained": "decode_tok_s", "prefill": "prefill_tok_s"}

Subject = tuple[Run, str, str]
"""(run, model, variant): a row of the table."""


def model_blocks(scenario: str, runs: Sequence[Run]) -> list[Block]:
    """A table with a row for each model and its fractions of the limit as bars; empty where models are few."""
    cells = [
        (run, row)
        for run in runs
        for row in run.summary.to_dict("records")
        if row["scenario"] == scenario and row["workload"] in RATES
    ]
    if len({row["model"] for _, row in cells}) < MANY_MODELS:
        return []
    contexts = len({number(row["context_tokens"]) for _, row in cells} - {None}) > 1
    names = list(dict.fromkeys(setting(row, contexts) for _, row in cells))
    found: dict[Subject, dict[str, Mapping[str, Any]]] = {}
    for run, row in cells:
        found.setdefault((run, row["model"], row["variant"]), {})[setting(row, contexts)] = row
    blocks: list[Block] = [_table(scenario, found, names)]
    if any(number(row["limit_fraction"]) is not None for _, row in cells):
        blocks.append(_chart(scenario, found, names))
    return blocks


def _several(found: Mapping[Subject, Any]) -> tuple[bool, bool]:
    """Whether there is more than one run, and more than one variant."""
    return len({run.path for run, _, _ in found}) > 1, len({variant for _, _, variant in found}) > 1


def _table(scenario: str, found: Mapping[Subject, Mapping[str, Mapping[str, Any]]], names: Sequence[str]) -> Table:
    several_runs, several_variants = _several(found)
    columns = [Column("model")]
    columns += [Column("variant")] if several_variants else []
    columns += [Column("run")] if several_runs else []
    columns += [Column(name, "number", "", "tok/s") for name in names] + [Column("start", "number", "", "s")]
    rows = []
    for (run, model, variant), by_setting in found.items():
        line: list[Any] = [model]
        line += [variant] if several_variants else []
        line += [run.label] if several_runs else []
        for name in names:
            row = by_setting.get(name)
            line.append(None if row is None else run.figure(row, RATES[row["workload"]], with_limit=True))
        rows.append([*line, _start_seconds(run, model, variant)])
    return Table(f"{scenario}-models", "Model by model", columns, rows)


def _start_seconds(run: Run, model: str, variant: str) -> float | None:
    parts = (run.meta.get("start_seconds") or {}).get(f"{model} {variant}") or {}
    return number(parts.get("total"))


def _chart(scenario: str, found: Mapping[Subject, Mapping[str, Mapping[str, Any]]], names: Sequence[str]) -> Bars:
    several_runs, several_variants = _several(found)
    groups = [
        " · ".join([model, *([variant] if several_variants else []), *([run.label] if several_runs else [])])
        for run, model, variant in found
    ]
    series = [
        BarSeries(
            name, [number(rows[name]["limit_fraction"]) if name in rows else NO_BAR for rows in found.values()], i
        )
        for i, name in enumerate(names)
    ]
    return Bars(
        f"{scenario}-models",
        "Fraction of the limit, model by model",
        "Bars: the fraction of the hardware's limit that each model reached, a bar a cell; figures in the table above.",
        [BarPanel("", groups, series)],
        "measured / limit of the hardware",
        horizontal=True,
        kind="percent",
    )
