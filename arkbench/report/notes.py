"""The published tables of the notes beside what was measured: one table and one or two charts each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from arkbench.records import COUNT_COLUMNS
from arkbench.report import published
from arkbench.report.blocks import Block, Column, Paragraph, Table
from arkbench.report.charts import BarPanel, Bars, BarSeries, Line, LinePanel, Lines
from arkbench.report.comparisons import COMPARISONS, TOK, Comparison, Measure
from arkbench.report.data import Run
from arkbench.report.figures import Figure, Printed, number, show, text
from arkbench.report.model_section import MANY_MODELS


@dataclass(frozen=True)
class Subject:
    """What one group of measured columns stands for: a run, and a model where the rows are not models."""

    run: Run
    scenario: str
    model: str
    label: str


@dataclass(frozen=True)
class Pair:
    """Base and new figure of one measure in one row, and the change from one to the other."""

    base: Figure
    new: Figure
    change: float | None


def note_blocks(scenario: str, runs: Sequence[Run]) -> list[Block]:
    """The published-beside-measured tables and charts of one scenario; empty where no table fits it."""
    blocks: list[Block] = []
    for comparison in COMPARISONS:
        subjects = _subjects(comparison, scenario, runs)
        if subjects:
            blocks += _comparison_blocks(comparison, scenario, subjects)
    blocks += _scaling_blocks(scenario, runs)
    blocks += _deadline_blocks(scenario, runs)
    return blocks


def _cells(comparison: Comparison, run: Run, scenario: str, variant: str, model: str = "") -> pd.DataFrame:
    rows = run.summary
    rows = rows[(rows["scenario"] == scenario) & (rows["variant"].str.lower() == variant)]
    rows = rows[rows["workload"].isin(comparison.workloads)]
    return rows[rows["model"] == model] if model else rows


def _subjects(comparison: Comparison, scenario: str, runs: Sequence[Run]) -> list[Subject]:
    found = []
    for run in runs:
        rows = pd.concat([_cells(comparison, run, scenario, variant) for variant in (comparison.base, comparison.new)])
        both = rows["variant"].str.lower().nunique() == 2 and not (
            comparison.by_model and _at_streams(comparison, rows).empty
        )
        models = [""] if comparison.by_model else list(dict.fromkeys(rows["model"]))
        found += [Subject(run, scenario, model, "") for model in models if both]
    return [Subject(s.run, s.scenario, s.model, _subject_label(s, found)) for s in found]


def _at_streams(comparison: Comparison, rows: pd.DataFrame) -> pd.DataFrame:
    _, new = comparison.streams
    return rows[rows["streams"].isin(new)] if new else rows


def _subject_label(subject: Subject, subjects: Sequence[Subject]) -> str:
    several_runs = len({other.run.path for other in subjects}) > 1
    label = subject.run.label if several_runs else subject.run.hardware
    if subject.model and subject.model not in label:
        label = f"{subject.model}, {label}"
    return label


def _row_keys(comparison: Comparison, subjects: Sequence[Subject]) -> tuple[list[tuple[Any, ...]], int, int]:
    """The rows that were measured: the published ones in their order, then what is beyond them; and how many published
    rows were not measured, of how many. A cell that failed counts as measured: its gap is shown."""
    table = published.table(comparison.file)
    keys = [tuple(_key(value) for value in row) for row in table[[key.published for key in comparison.rows]].values]
    held = set()
    for subject in subjects:
        for variant, streams in _sides(comparison):
            rows = _cells(comparison, subject.run, subject.scenario, variant, subject.model)
            if streams and comparison.by_model:
                rows = rows[rows["streams"].isin(streams)]
            held |= {tuple(_key(value) for value in row) for row in rows[[k.column for k in comparison.rows]].values}
    measured = [key for key in keys if key in held]
    beyond = [key for key in held if key not in keys and None not in key]
    return measured + sorted(beyond), len(keys) - len(measured), len(keys)


def _left_out(missing: int, of: int) -> list[Block]:
    return [Paragraph(f"{missing} of {of} published rows were not measured and are left out.")] if missing else []


def _sides(comparison: Comparison) -> list[tuple[str, tuple[int, ...]]]:
    """(variant, numbers of streams that count; empty: any) of the base and of the new variant."""
    return list(zip((comparison.base, comparison.new), comparison.streams, strict=True))


def _key(value: Any) -> Any:
    as_number = number(value)
    if as_number is not None:
        return int(as_number)
    return published.canonical(value) if isinstance(value, str) else None


def _published_row(comparison: Comparison, key: tuple[Any, ...]) -> Mapping[str, Any]:
    for row in published.texts(comparison.file):
        if tuple(_key(row[k.published]) for k in comparison.rows) == key:
            return row
    return {}


def _published_pair(comparison: Comparison, measure: Measure, key: tuple[Any, ...]) -> Pair:
    row = _published_row(comparison, key)
    streams = [next(iter(side), 0) for side in comparison.streams]
    if comparison.base_streams_column and row:
        streams[0] = int(row[comparison.base_streams_column])
    if not comparison.by_model and comparison.rows[0].column == "streams":
        streams = [key[0], key[0]]
    model = key[0] if comparison.by_model else published.NOTE_MODELS[comparison.note]
    figures = []
    for column, count in zip((measure.published_base, measure.published_new), streams, strict=True):
        value = number(row.get(column))
        limit, floor = published.published_limit_fraction(model, value, count) if measure.limit else (None, False)
        figures.append(Figure(value, limit=limit, at_least=floor))
    printed = row.get(measure.published_change)
    return Pair(*figures, Printed(printed) if printed else _change(measure, *figures))


def _change(measure: Measure, base: Figure, new: Figure) -> float | None:
    return measure.compare(base.value, new.value)


def _measured_pair(comparison: Comparison, measure: Measure, key: tuple[Any, ...], subject: Subject) -> Pair:
    figures = []
    for variant, streams in _sides(comparison):
        rows = _cells(comparison, subject.run, subject.scenario, variant, subject.model)
        for value, row_key in zip(key, comparison.rows, strict=True):
            rows = rows[[_key(cell) == value for cell in rows[row_key.column]]]
        if streams:
            rows = rows[rows["streams"].isin(streams)]
        if rows.empty:
            figures.append(Figure(None))
            continue
        order = [comparison.workloads.index(workload) for workload in rows["workload"]]
        row = rows.iloc[order.index(min(order))]
        figures.append(subject.run.figure(row, measure.column, measure.limit))
    return Pair(*figures, _change(measure, *figures))


def _comparison_blocks(comparison: Comparison, scenario: str, subjects: Sequence[Subject]) -> list[Block]:
    keys, missing, of = _row_keys(comparison, subjects)
    if not keys:
        return _left_out(missing, of)
    blocks: list[Block] = []
    for index, measure in enumerate(comparison.measures):
        suffix = "" if index == 0 else f"-{measure.name.replace(' ', '-')}"
        name = f"{scenario}-{comparison.key.removeprefix(f'{scenario}-').removeprefix(scenario)}{suffix}".strip("-")
        name = name.replace("--", "-")
        pairs = {key: [_published_pair(comparison, measure, key)] for key in keys}
        for key in keys:
            pairs[key] += [_measured_pair(comparison, measure, key, subject) for subject in subjects]
        measured_any = any(
            pair.base.value is not None or pair.new.value is not None for key in keys for pair in pairs[key][1:]
        )
        blocks.append(_comparison_table(comparison, measure, name, keys, pairs, subjects))
        if index == 0:
            blocks += _left_out(missing, of)
        if measured_any:
            blocks += _comparison_charts(comparison, measure, name, keys, pairs, subjects)
    return blocks


def _groups(comparison: Comparison, subjects: Sequence[Subject]) -> list[str]:
    model = published.NOTE_MODELS.get(comparison.note)
    place = published.place(comparison.note) + (f", {model}" if model else "")
    return [f"published ({place})", *[f"measured ({subject.label})" for subject in subjects]]


def _comparison_table(
    comparison: Comparison,
    measure: Measure,
    name: str,
    keys: Sequence[tuple[Any, ...]],
    pairs: Mapping[tuple[Any, ...], Sequence[Pair]],
    subjects: Sequence[Subject],
) -> Table:
    columns = [Column(key.header, "text" if key.column == "model" else "integer") for key in comparison.rows]
    kind = "change" if measure.change == "percent" else "ratio"
    heading = {"ratio": "gain", "percent": "change", "reduction": "gain"}[measure.change]
    for index, group in enumerate(_groups(comparison, subjects)):
        names = [comparison.base, comparison.new]
        if index == 0:
            names = [own or name for own, name in zip(comparison.published_names, names, strict=True)]
        number_kind = "number" if index else "printed"
        columns += [Column(name, number_kind, group, measure.unit) for name in names]
        columns.append(Column(heading, kind, group))
    rows = []
    for key in keys:
        row: list[Any] = list(key)
        for pair in pairs[key]:
            row += [pair.base, pair.new, pair.change]
        rows.append(row)
    return Table(name, f"{measure.title}, published beside measured", columns, rows)


def _comparison_charts(
    comparison: Comparison,
    measure: Measure,
    name: str,
    keys: Sequence[tuple[Any, ...]],
    pairs: Mapping[tuple[Any, ...], Sequence[Pair]],
    subjects: Sequence[Subject],
) -> list[Block]:
    panels = []
    for outer in _outer_keys(comparison, keys):
        inner = [key for key in keys if len(key) == 1 or key[0] == outer]
        own, *measured = (
            _comparison_panel(comparison, measure, inner, pairs, column, title)
            for column, title in enumerate(_panel_titles(comparison, subjects, outer))
        )
        if any(_has_figure(panel) for panel in measured):
            panels += [panel for panel in (own, *measured) if _has_figure(panel)]
    chart = Bars(
        name,
        measure.title,
        _comparison_alt(comparison, measure, keys, pairs),
        panels,
        f"{measure.name}, {measure.unit}",
        comparison.rows[-1].header,
        horizontal=comparison.by_model,
    )
    if not comparison.by_model:
        return [chart]
    return [_change_chart(comparison, measure, name, keys, pairs, subjects), chart]


def _panel_titles(comparison: Comparison, subjects: Sequence[Subject], outer: Any) -> list[str]:
    titles = [title[0].upper() + title[1:] for title in _groups(comparison, subjects)]
    if outer is None:
        return titles
    return [f"{outer:,} tokens · {title if len(subjects) > 1 else title.split(' (')[0]}" for title in titles]


def _comparison_panel(
    comparison: Comparison,
    measure: Measure,
    keys: Sequence[tuple[Any, ...]],
    pairs: Mapping[tuple[Any, ...], Sequence[Pair]],
    column: int,
    title: str,
) -> BarPanel:
    here = [pairs[key][column] for key in keys]
    gap = "not measured" if column else "not published"
    return BarPanel(
        title,
        [f"{key[-1]:,}" if isinstance(key[-1], int) else text(key[-1]) for key in keys],
        [
            BarSeries(comparison.base, [pair.base.value for pair in here], "base", gap),
            BarSeries(comparison.new, [pair.new.value for pair in here], 0, gap),
        ],
        [measure.show_change(pair.change) for pair in here],
    )


def _has_figure(panel: BarPanel) -> bool:
    return any(value is not None for series in panel.series for value in series.values)


def _outer_keys(comparison: Comparison, keys: Sequence[tuple[Any, ...]]) -> list[Any]:
    return list(dict.fromkeys(key[0] for key in keys)) if len(comparison.rows) > 1 else [None]


def _comparison_alt(
    comparison: Comparison,
    measure: Measure,
    keys: Sequence[tuple[Any, ...]],
    pairs: Mapping[tuple[Any, ...], Sequence[Pair]],
) -> str:
    parts = []
    for key in keys:
        changes = [measure.show_change(pair.change) or "none" for pair in pairs[key]]
        where = " × ".join(text(part) for part in key)
        parts.append(f"{where}: published {changes[0]}, measured {', '.join(changes[1:])}")
    return f"Bars: {measure.name}, {comparison.new} against {comparison.base}. {'; '.join(parts)}."


def _change_chart(
    comparison: Comparison,
    measure: Measure,
    name: str,
    keys: Sequence[tuple[Any, ...]],
    pairs: Mapping[tuple[Any, ...], Sequence[Pair]],
    subjects: Sequence[Subject],
) -> Bars:
    """Model by model, the published gain and the measured one; a fall in percent is drawn as its size."""
    sign = -1 if measure.change == "percent" else 1
    names = ["published", *[f"measured ({subject.label})" for subject in subjects]]
    series = []
    for column, series_name in enumerate(names):
        gap = "not published" if column == 0 else "not measured"
        changes = [pairs[key][column].change for key in keys]
        values = changes if sign == 1 else [None if change is None else -change for change in changes]
        series.append(BarSeries(series_name, values, "base" if column == 0 else column - 1, gap))
    label = f"{comparison.new} / {comparison.base}" if sign == 1 else f"fall from {comparison.base}, %"
    return Bars(
        f"{name}-gain",
        f"{measure.title}: gain, model by model",
        _comparison_alt(comparison, measure, keys, pairs),
        [BarPanel("", [text(key[0]) for key in keys], series)],
        label,
        horizontal=True,
        kind="ratio" if sign == 1 else "number",
    )


SCALING_MODEL = "Qwen3.6-35B"


def _scaling_blocks(scenario: str, runs: Sequence[Run]) -> list[Block]:
    """Streams by context: per-stream speed and total, with the published total = speed of a stream x streams.

    Of many models the published one alone: the others stand model by model.
    """
    subjects: list[tuple[Run, str, pd.DataFrame]] = []
    for run in runs:
        rows = run.summary
        rows = rows[(rows["scenario"] == scenario) & (rows["workload"] == "decode")]
        rows = rows[rows["variant"].str.lower().isin(["ark-2.0", "best"])]
        for (model, variant), group in rows.groupby(["model", "variant"], sort=False):
            if group["streams"].nunique() > 1:
                subjects.append((run, f"{model}, {variant}", group))
    many = len(subjects) >= MANY_MODELS
    if many:
        subjects = [subject for subject in subjects if subject[1].startswith(SCALING_MODEL)]
    if not subjects:
        return []
    several = len({run.path for run, _, _ in subjects}) > 1
    labels = [f"{name}, {run.label if several else run.hardware}" for run, name, _ in subjects]
    table = published.table("decode_batching_scaling.csv")
    printed = {(int(row.context_tokens), int(row.streams)) for row in table.itertuples()}
    keys: set[tuple[Any, Any]] = set()
    for _, _, group in subjects:
        keys |= {(_key(c), _key(s)) for c, s in zip(group["context_tokens"], group["streams"], strict=True)}
    keys = {key for key in keys if None not in key}
    if many and not keys & printed:
        return []
    return [
        _scaling_table(scenario, sorted(keys), table, subjects, labels),
        *_left_out(len(printed - keys), len(printed)),
        _scaling_chart(scenario, table, subjects, labels),
    ]


def _scaling_table(
    scenario: str,
    keys: Sequence[tuple[int, int]],
    table: pd.DataFrame,
    subjects: Sequence[tuple[Run, str, pd.DataFrame]],
    labels: Sequence[str],
) -> Table:
    groups = [f"published (2 × {published.PUBLISHED_GPU}, {SCALING_MODEL})", *labels]
    columns = [Column("context", "integer"), Column("streams", "integer")]
    for index, group in enumerate(groups):
        columns += [Column(name, "number" if index else "printed", group, TOK) for name in ("per stream", "total")]
        if index:
            columns.append(Column("per stream × streams", "number", group, TOK))
    rows = []
    for context, streams in keys:
        match = table[(table["context_tokens"] == context) & (table["streams"] == streams)]
        source = match.iloc[0] if len(match) else {}
        total = number(source.get("total_tok_s"))
        fraction, floor = published.published_limit_fraction(SCALING_MODEL, total, streams)
        row: list[Any] = [context, streams, number(source.get("per_stream_tok_s"))]
        row.append(Figure(total, limit=fraction, at_least=floor))
        for run, _, group in subjects:
            here = group[(group["context_tokens"] == context) & (group["streams"] == streams)]
            if here.empty:
                row += [None, None, None]
                continue
            speed = number(here.iloc[0]["stream_tok_s"])
            row += [
                run.figure(here.iloc[0], "stream_tok_s"),
                run.figure(here.iloc[0], "decode_tok_s", with_limit=True),
                None if speed is None else speed * streams,
            ]
        rows.append(row)
    return Table(f"{scenario}-scaling", "Scaling over streams, published beside measured", columns, rows)


def _scaling_chart(
    scenario: str, table: pd.DataFrame, subjects: Sequence[tuple[Run, str, pd.DataFrame]], labels: Sequence[str]
) -> Lines:
    lines = {"decode_tok_s": [], "stream_tok_s": []}
    for column, source in (("decode_tok_s", "total_tok_s"), ("stream_tok_s", "per_stream_tok_s")):
        for context, rows in table.groupby("context_tokens"):
            shown = rows.dropna(subset=[source])
            if len(shown):
                name = f"published, {context:,} tokens"
                lines[column].append(Line(name, list(map(float, shown["streams"])), list(shown[source]), (), True))
        for (_, _, group), label in zip(subjects, labels, strict=True):
            for context, rows in group.sort_values("streams").groupby("context_tokens", dropna=False):
                prefix = f"{label}, " if len(subjects) > 1 else "measured, "
                name = f"{prefix}{show(number(context), 'integer')} tokens"
                values = [number(value) for value in rows[column]]
                lines[column].append(Line(name, [number(value) for value in rows["streams"]], values))
    return Lines(
        f"{scenario}-scaling",
        "Scaling over streams",
        "Lines over the number of streams: total throughput rises, the speed of one stream falls; "
        "the figures are in the table beside it.",
        [LinePanel("All streams together", lines["decode_tok_s"]), LinePanel("One stream", lines["stream_tok_s"])],
        "streams",
        "decode throughput, tok/s",
        x_log=True,
    )


def _deadline_blocks(scenario: str, runs: Sequence[Run]) -> list[Block]:
    """Bursts at the limit: how many of the requests had their first token in time."""
    table = published.table("pipelined_prefill_limit.csv")
    columns = [Column("prompt tokens", "integer"), Column("at once", "integer")]
    own = f"published ({published.place('pipelined-prefill')})"
    columns += [Column(variant, "text", own) for variant in ("ark-2.0", "ark-2.1")]
    columns.append(Column("refused, ark-2.1", "integer", own))
    several = len(runs) > 1
    sources = []
    for run in runs:
        cells = run.cells[(run.cells["scenario"] == scenario) & (run.cells["workload"] == "burst")]
        if len(cells):
            sources.append(cells)
            group = f"measured ({run.label if several else run.hardware})"
            columns += [Column(variant, "text", group) for variant in ("ark-2.0", "ark-2.1")]
            columns.append(Column("refused, ark-2.1", "integer", group))
    rows = []
    for entry in table.itertuples():
        row: list[Any] = [entry.prompt_tokens, entry.at_once]
        row += [f"{n} of {entry.requests}" for n in (entry.ark_2_0_answered_in_90_s, entry.ark_2_1_answered_in_90_s)]
        row.append(entry.ark_2_1_refused)
        measured = False
        for cells in sources:
            here = cells[(cells["prompt_tokens"] == entry.prompt_tokens) & (cells["at_once"] == entry.at_once)]
            answers = [_answered(here[here["variant"].str.lower() == variant]) for variant in ("ark-2.0", "ark-2.1")]
            refused = here[here["variant"].str.lower() == "ark-2.1"]["requests_refused"]
            measured = measured or any(answers)
            row += [*answers, number(refused.sum()) if refused.count() else None]
        rows += [row] if measured else []
    if not rows:
        return []
    caption = "Bursts at the limit: answered within 90 s"
    return [Table(f"{scenario}-in-time", caption, columns, rows), *_left_out(len(table) - len(rows), len(table))]


def _answered(cells: pd.DataFrame) -> str | None:
    if cells.empty or not cells["requests_ok"].count():
        return None
    return f"{cells['requests_ok'].sum():.0f} of {cells[list(COUNT_COLUMNS)].sum().sum():.0f}"


def published_counterpart(row: Mapping[str, Any]) -> Figure | None:
    """The published figure (first measure of its table) of the row and variant that a measured cell stands for."""
    for comparison in COMPARISONS:
        variants = (comparison.base, comparison.new)
        variant = row["variant"].lower()
        if comparison.note != row["scenario"] or variant not in variants or row["workload"] not in comparison.workloads:
            continue
        side = variants.index(variant)
        streams = _sides(comparison)[side][1]
        if streams and number(row["streams"]) not in streams:
            continue
        key = tuple(_key(row[k.column]) for k in comparison.rows)
        pair = _published_pair(comparison, comparison.measures[0], key)
        figure = (pair.base, pair.new)[side]
        if figure.value is not None:
            return figure
    return None
