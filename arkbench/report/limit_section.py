"""How far the measured and the published figures stand from what the hardware allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from arkbench.metrics import ABOVE_LIMIT
from arkbench.report.blocks import Block, Column, Details, Paragraph, Section, Table
from arkbench.report.charts import NO_BAR, BarPanel, Bars, BarSeries
from arkbench.report.data import Run, above_limit, setting
from arkbench.report.figures import Figure, number, show
from arkbench.report.notes import published_counterpart
from arkbench.report.published import place
from arkbench.report.style import roles

ROWS_SHOWN, BARS_SHOWN = 14, 40


def section(runs: Sequence[Run]) -> Section:
    """The best and the worst in a sentence, the chart, and the table."""
    rows = [(run, row) for run in runs for row in run.summary.to_dict("records") if _limited(row)]
    if not rows:
        text = "No cell has a limit: the target does not say how many bytes a step reads."
        return Section("limit", "How far from the limit", [Paragraph(text)])
    table = _table(rows, len(runs) > 1)
    chart = _chart(rows, runs)
    blocks: list[Block] = [Paragraph(_sentence(rows))]
    if len(rows) > BARS_SHOWN:
        blocks.append(Details(f"Every cell with a limit ({len(rows)}), chart and table", [chart, table]))
    elif len(rows) > ROWS_SHOWN:
        blocks += [chart, Details(f"Every cell with a limit ({len(rows)})", [table])]
    else:
        blocks += [chart, table]
    return Section("limit", "How far from the limit", blocks)


def _limited(row: Mapping[str, Any]) -> bool:
    return number(row["limit_fraction"]) is not None or number(row["limit_tok_s"]) is not None


def _rate(row: Mapping[str, Any]) -> str:
    return "prefill_tok_s" if row["workload"] in ("prefill", "burst") else "decode_tok_s"


def _sentence(rows: Sequence[tuple[Run, Mapping[str, Any]]]) -> str:
    above = sum(above_limit(row) for _, row in rows)
    warning = f" Marked (!), {above} of {len(rows)}: {ABOVE_LIMIT}." if above else ""
    known = [(run, row) for run, row in rows if number(row["limit_fraction"]) is not None and not run.mark(row)]
    if not known:
        return f"No cell with a valid figure reached a known fraction of its limit.{warning}"
    known.sort(key=lambda entry: entry[1]["limit_fraction"])

    def name(entry: tuple[Run, Mapping[str, Any]]) -> str:
        run, row = entry
        share = show(number(row["limit_fraction"]), "percent")
        return f"{share} ({row['model']}, {row['variant']}, {setting(row)}, {run.hardware})"

    text = f"The nearest to its limit: {name(known[-1])}."
    if len(known) > 1:
        text += f" The farthest: {name(known[0])}."
    text += " The limit is what the memory bus, or the matrix rate where that is smaller, allows at that load."
    return text + warning


def _chart(rows: Sequence[tuple[Run, Mapping[str, Any]]], runs: Sequence[Run]) -> Bars:
    """A panel for each run and scenario; groups are cells, series variants."""
    panels = []
    look = roles([row["variant"] for _, row in rows])
    for run, scenario in dict.fromkeys((run.label, row["scenario"]) for run, row in rows):
        here = [row for other, row in rows if other.label == run and row["scenario"] == scenario]
        several = len({row["model"] for row in here}) > 1
        contexts = len({row["context_tokens"] for row in here if number(row["context_tokens"]) is not None}) > 1
        found = {(_group(row, several, contexts), row["variant"]): number(row["limit_fraction"]) for row in here}
        groups = list(dict.fromkeys(group for group, _ in found))
        above = {_group(row, several, contexts) for row in here if above_limit(row)}
        series = [
            BarSeries(variant, [found.get((group, variant), NO_BAR) for group in groups], role)
            for variant, role in look.items()
            if any(row["variant"] == variant for row in here)
        ]
        title = f"{scenario}, {run}"
        names = [f"{group} (!)" if group in above else group for group in groups]
        panels.append(BarPanel(title if several else f"{title}, {here[0]['model']}", names, series))
    alt = "Bars: fraction of the hardware's limit that each cell reached. " + "; ".join(
        f"{panel.title}: at most {show(_largest(panel), 'percent')}" for panel in panels
    )
    return Bars("limit", "Fraction of the limit", alt, panels, "measured / limit", horizontal=True, kind="percent")


def _largest(panel: BarPanel) -> float | None:
    return max((value for series in panel.series for value in series.values if value and value > 0), default=None)


def _group(row: Mapping[str, Any], several: bool, contexts: bool) -> str:
    name = setting(row, contexts)
    return f"{row['model']} · {name}" if several else name


def _table(rows: Sequence[tuple[Run, Mapping[str, Any]]], several: bool) -> Table:
    counterparts = [published_counterpart(row) or Figure(None) for _, row in rows]
    pairs = zip(rows, counterparts, strict=True)
    places = dict.fromkeys(place(row["scenario"]) for (_, row), found in pairs if found.value is not None)
    own = ", ".join(["published", *places])
    columns = [Column("model"), Column("cell"), Column("variant")]
    columns += [Column("run")] if several else []
    columns += [
        Column("rate", "number", "measured", "tok/s"),
        Column("limit", "number", "measured", "tok/s"),
        Column("of limit", "percent", "measured"),
        Column("rate", "number", own, "tok/s"),
        Column("of its limit", "percent", own),
    ]
    written = []
    for (run, row), counterpart in zip(rows, counterparts, strict=True):
        line: list[Any] = [row["model"], row["cell"], row["variant"]]
        line += [run.label] if several else []
        figure = run.figure(row, _rate(row))
        line += [figure, number(row["limit_tok_s"]), number(row["limit_fraction"])]
        line += [counterpart.value, counterpart.limit]
        written.append(line)
    return Table("limit", "Measured and published figures and their fractions of the limit", columns, written)
