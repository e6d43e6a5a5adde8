"""A section for each scenario: the note's tables, further charts, and every cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from arkbench.report.blocks import Block, Column, Details, Paragraph, Section, Table
from arkbench.report.charts import (
    NO_BAR,
    BarPanel,
    Bars,
    BarSeries,
    Line,
    LinePanel,
    Lines,
    Span,
    Timeline,
    TimelinePanel,
)
from arkbench.report.data import Run, scenario_entries, setting
from arkbench.report.figures import number, show, text
from arkbench.report.kernel_section import kernel_blocks
from arkbench.report.model_section import model_blocks
from arkbench.report.notes import note_blocks
from arkbench.report.style import Role, roles
from arkbench.report.technique_section import technique_blocks

CELL_FIGURES = (
    ("decode_tok_s", "decode", "tok/s"),
    ("stream_tok_s", "per stream", "tok/s"),
    ("prefill_tok_s", "prefill", "tok/s"),
    ("ttft_p50_s", "TTFT median", "s"),
    ("ttft_max_s", "TTFT slowest", "s"),
    ("tpot_p50_s", "TPOT median", "s"),
    ("itl_p50_s", "ITL median", "s"),
    ("itl_p99_s", "ITL p99", "s"),
    ("cached_tokens", "cached tokens", ""),
    ("energy_j", "energy", "J"),
    ("wh_per_1k_tokens", "gross", "Wh/1,000 tokens"),
    ("net_wh_per_1k_tokens", "net of idle", "Wh/1,000 tokens"),
    ("limit_tok_s", "limit", "tok/s"),
)


def sections(runs: Sequence[Run]) -> list[Section]:
    """One section a scenario, in the order in which they were run."""
    names = dict.fromkeys(name for run in runs for name in run.summary["scenario"] if name)
    return [_section(name, runs) for name in names]


def scenario_entry(run: Run, name: str) -> Mapping[str, Any]:
    """What run.json says of a scenario; empty where it says nothing."""
    return next((entry for entry in scenario_entries(run) if entry.get("name") == name), {})


def _section(name: str, runs: Sequence[Run]) -> Section:
    here = [run for run in runs if (run.summary["scenario"] == name).any()]
    entry = scenario_entry(here[0], name)
    blocks: list[Block] = []
    if text(entry.get("description")):
        blocks.append(Paragraph(" ".join(text(entry["description"]).split())))
    noted = note_blocks(name, here) + kernel_blocks(name, here)
    blocks += technique_blocks(name, here) + noted
    cells = _long(name, here)
    by_model = [] if noted else model_blocks(name, here)
    if not noted:
        blocks += by_model or _bar_charts(name, cells)
    blocks += _line_charts(name, cells, scaling=any(isinstance(block, Lines) for block in noted))
    blocks += _ttft_chart(name, cells)
    if not any("energy" in block.key for block in noted if isinstance(block, Bars)):
        blocks += _energy_chart(name, cells)
    blocks += _timeline_chart(name, here)
    table = _cell_table(name, here)
    blocks.append(table if not (noted or by_model) else Details(f"Every cell of {name} ({len(table.rows)})", [table]))
    return Section(f"scenario-{name}", text(entry.get("title")) or name, blocks)


def _long(name: str, runs: Sequence[Run]) -> pd.DataFrame:
    """The scenario's summary rows of all runs, with `subject` (model and run, as far as they differ)."""
    parts = []
    for run in runs:
        rows = run.summary[run.summary["scenario"] == name].copy()
        rows["run"] = run.label
        parts.append(rows)
    cells = pd.concat(parts, ignore_index=True)
    several_runs, several_models = cells["run"].nunique() > 1, cells["model"].nunique() > 1
    cells["subject"] = [
        ", ".join(([row.model] if several_models or not several_runs else []) + ([row.run] if several_runs else []))
        for row in cells.itertuples()
    ]
    return cells


def _cell_table(name: str, runs: Sequence[Run]) -> Table:
    """One line a cell with every figure that any cell of the scenario has."""
    rows = [
        (run, row | {"net_wh_per_1k_tokens": net_energy(row)})
        for run in runs
        for row in run.summary.to_dict("records")
        if row["scenario"] == name
    ]
    used = [(c, n, u) for c, n, u in CELL_FIGURES if any(number(row[c]) is not None for _, row in rows)]
    limited = any(number(row["limit_fraction"]) is not None for _, row in rows)
    several_models = len({row["model"] for _, row in rows}) > 1
    columns = [Column("cell"), Column("variant")]
    columns += [Column("model")] if several_models else []
    columns += [Column("run")] if len(runs) > 1 else []
    columns += [Column(heading, "number", "", unit) for _, heading, unit in used]
    columns += [Column("of limit", "percent")] if limited else []
    written = []
    for run, row in rows:
        line: list[Any] = [row["cell"], row["variant"]]
        line += [row["model"]] if several_models else []
        line += [run.label] if len(runs) > 1 else []
        line += [run.figure(row, column) for column, _, _ in used]
        line += [number(row["limit_fraction"])] if limited else []
        written.append(line)
    return Table(f"{name}-cells", f"Every cell of {name}: medians over the repetitions", columns, written)


def _line_roles(rows: pd.DataFrame, contexts: bool) -> dict[tuple[str, Any], Role]:
    """A look for each line; with several contexts a variant has several lines, and colours tell all of them apart."""
    pairs = list(dict.fromkeys(zip(rows["variant"], rows["context"], strict=True)))
    if contexts:
        return {pair: index for index, pair in enumerate(pairs)}
    look = roles(rows["variant"])
    return {pair: look[pair[0]] for pair in pairs}


def net_energy(row: Mapping[str, Any]) -> float | None:
    """Wh per 1,000 tokens without what the idle machine draws: gross - idle watts / (3.6 x tokens per second)."""
    column = "decode_tok_s" if row["workload"] in ("decode", "sustained") else "prefill_tok_s"
    gross, idle, rate = (number(row[name]) for name in ("wh_per_1k_tokens", "idle_w", column))
    if gross is None or idle is None or not rate:
        return None
    return gross - idle / (3.6 * rate)


def _groups_by(cells: pd.DataFrame, columns: Iterable[str]) -> Iterable[tuple[tuple[Any, ...], pd.DataFrame]]:
    return cells.groupby(list(columns), sort=False, dropna=False)


def _variant_bars(cells: pd.DataFrame, value: str, title: str) -> BarPanel:
    """Bars of one figure: a group a cell (and subject), a series a variant."""
    several = cells["subject"].nunique() > 1
    several_contexts = cells["context_tokens"].nunique() > 1
    names = [setting(row, several_contexts) for row in cells.to_dict("records")]
    labels = [
        f"{row.subject} · {name}" if several else name for row, name in zip(cells.itertuples(), names, strict=True)
    ]
    cells = cells.assign(group=labels)
    groups, look = list(dict.fromkeys(labels)), roles(cells["variant"])
    found = {(row["group"], row["variant"]): number(row[value]) for row in cells.to_dict("records")}
    series = [
        BarSeries(variant, [found.get((group, variant), NO_BAR) for group in groups], role)
        for variant, role in look.items()
    ]
    return BarPanel(title, groups, series)


def _bar_charts(name: str, cells: pd.DataFrame) -> list[Block]:
    charts: list[Block] = []
    for column, heading in (("decode_tok_s", "Decode throughput"), ("prefill_tok_s", "Prefill throughput")):
        workloads = cells[cells[column].notna()]["workload"].unique()
        shown = cells[cells["workload"].isin(workloads)]
        if column == "prefill_tok_s":
            shown = shown[shown["workload"].isin(["prefill", "burst"])]
        if shown.empty or not shown[column].notna().any():
            continue
        panel = _variant_bars(shown, column, "")
        alt = f"Bars: {heading.lower()} of each cell, variant by variant; the figures are in the table of cells."
        key = f"{name}-{column.split('_')[0]}"
        charts.append(Bars(key, heading, alt, [panel], "tok/s", horizontal=True))
    return charts


def _line_charts(name: str, cells: pd.DataFrame, scaling: bool) -> list[Block]:
    """Throughput over streams, and against the speed of one stream, where there are three counts or more."""
    decode = cells[(cells["workload"] == "decode") & cells["streams"].notna()]
    counts = decode.groupby("subject")["streams"].nunique()
    decode = decode[decode["subject"].isin(counts[counts >= 3].index)]
    if decode.empty:
        return []
    decode = decode.assign(context=[show(number(value), "integer") for value in decode["context_tokens"]])
    over: list[LinePanel] = []
    pareto: list[LinePanel] = []
    contexts = decode["context"].nunique() > 1
    for (subject,), rows in _groups_by(decode, ("subject",)):
        streams, trade = [], []
        look = _line_roles(rows, contexts)
        for (variant, context), group in _groups_by(rows, ("variant", "context")):
            group = group.sort_values("streams")
            label = f"{variant}, {context} tokens" if contexts else variant
            counts_here = [number(value) for value in group["streams"]]
            total = [number(value) for value in group["decode_tok_s"]]
            each = [number(value) for value in group["stream_tok_s"]]
            role = look[(variant, context)]
            streams.append(Line(label, counts_here, total, role=role))
            trade.append(Line(label, each, total, [f"{value:.0f}" for value in counts_here], role=role))
        over.append(LinePanel(subject, streams))
        pareto.append(LinePanel(subject, trade))
    chart = Lines(
        f"{name}-streams", "Decode throughput over streams",
        "Lines: decode throughput of all streams over their number, a line a variant; figures in the table of cells.",
        over, "streams", "all streams, tok/s", x_log=True,
    )  # fmt: skip
    trade_chart = Lines(
        f"{name}-pareto", "Throughput against the speed of one stream (beside each point: streams)",
        "Lines: throughput of all streams against the speed of one stream; the number of streams stands beside each "
        "point; figures in the table of cells.",
        pareto, "one stream, tok/s", "all streams, tok/s",
    )  # fmt: skip
    return [trade_chart] if scaling else [chart, trade_chart]


def _ttft_chart(name: str, cells: pd.DataFrame) -> list[Block]:
    """Time to the first token over prompt length: the median of single prompts, the slowest of a burst."""
    rows = cells[cells["workload"].isin(["prefill", "burst"]) & cells["prompt_tokens"].notna()].copy()
    if rows["prompt_tokens"].nunique() < 2:
        return []
    rows["ttft"] = [
        row.ttft_max_s if row.workload == "burst" else row.ttft_p50_s for row in rows.itertuples(index=False)
    ]
    bursts = rows[rows["workload"] == "burst"]
    if bursts["at_once"].nunique() <= 1:
        panels = [_ttft_panel(group, subject, "variant") for (subject,), group in _groups_by(rows, ("subject",))]
    else:
        several = rows["subject"].nunique() > 1
        panels = [
            _ttft_panel(group, f"{subject} · {variant}" if several else variant, "at_once")
            for (subject, variant), group in _groups_by(bursts, ("subject", "variant"))
        ]
    return [
        Lines(
            f"{name}-ttft", "Time to the first token over prompt length",
            "Lines: time to the first token over prompt length, a line a variant; figures in the table of cells.",
            panels, "prompt tokens", "slowest TTFT, s" if len(bursts) else "TTFT, s", x_log=True, y_log=True,
        )
    ]  # fmt: skip


def _ttft_panel(rows: pd.DataFrame, title: str, by: str) -> LinePanel:
    """A line for each variant, or for each number of prompts at once."""
    rows = rows.sort_values([by, "prompt_tokens"] if by == "at_once" else "prompt_tokens", kind="stable")
    names = {value: text(value) if by == "variant" else f"{value:.0f} at once" for value in rows[by]}
    look = roles(list(names)) if by == "variant" else {value: index for index, value in enumerate(names)}
    return LinePanel(
        title,
        [
            Line(
                names[value],
                [number(tokens) for tokens in part["prompt_tokens"]],
                [number(seconds) for seconds in part["ttft"]],
                role=look[value],
            )
            for (value,), part in _groups_by(rows, (by,))
        ],
    )


def _energy_chart(name: str, cells: pd.DataFrame) -> list[Block]:
    workloads = cells[cells["wh_per_1k_tokens"].notna()]["workload"].unique()
    made = cells[cells["workload"].isin(set(workloads) & {"decode", "sustained"})]
    read = cells[cells["workload"].isin(set(workloads) - {"decode", "sustained"})]
    panels = [
        _variant_bars(rows, "wh_per_1k_tokens", f"Per 1,000 {word}")
        for rows, word in ((made, "tokens generated"), (read, "prompt tokens read"))
        if len(rows)
    ]
    if not panels:
        return []
    return [
        Bars(
            f"{name}-energy", "Energy per 1,000 tokens",
            "Bars: energy of each cell, variant by variant; figures in the table of cells.",
            panels, "Wh per 1,000 tokens, gross", horizontal=True,
        )
    ]  # fmt: skip


def _timeline_chart(name: str, runs: Sequence[Run]) -> list[Block]:
    panels = []
    for run in runs:
        lines = [line for line in run.timeline if line.get("scenario", name) == name]
        by_panel: dict[str, list[Mapping[str, Any]]] = {}
        for line in lines:
            parts = [text(line.get("variant")), text(line.get("cell")), run.label if len(runs) > 1 else ""]
            by_panel.setdefault(" · ".join(part for part in parts if part) or run.hardware, []).append(line)
        panels += [TimelinePanel(title, _spans(entries)) for title, entries in by_panel.items()]
    if not panels:
        return []
    alt = "Time line: for each stage, which piece of which request it worked on and when. " + " ".join(
        f"{panel.title}: {len(panel.spans)} pieces, {max(span.end_s for span in panel.spans):.3g} s."
        for panel in panels
    )
    return [Timeline(f"{name}-timeline", "Which stage worked on which piece when", alt, panels)]


def _spans(entries: Sequence[Mapping[str, Any]]) -> list[Span]:
    start = min(float(entry["start_s"]) for entry in entries)
    return [
        Span(
            int(entry["stage"]),
            int(entry["request"]),
            None if number(entry.get("piece")) is None else int(entry["piece"]),
            text(entry.get("kind")),
            float(entry["start_s"]) - start,
            float(entry["end_s"]) - start,
        )
        for entry in entries
    ]
