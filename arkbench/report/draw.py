"""Draws charts with matplotlib: one drawing, as SVG in several palettes and as PNG.

Every mark carries an id that starts with `point` or `missing`, so that what is on a chart can be counted.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from arkbench.report import style
from arkbench.report.charts import (
    BarPanel,
    Bars,
    BarSeries,
    Chart,
    Line,
    LinePanel,
    Lines,
    Timeline,
    TimelinePanel,
    is_no_bar,
)
from arkbench.report.figures import show, significant

WIDE, NARROW = 9.4, 4.3
INK, MUTED = style.LIGHT["ink"], style.LIGHT["muted"]


@dataclass(frozen=True)
class Drawing:
    """A chart's drawings: SVG texts in the light palette, and PNG bytes."""

    wide: str
    narrow: str
    png: bytes


def draw(chart: Chart) -> Drawing:
    """Draws the chart for wide and for narrow pages."""
    with matplotlib.rc_context(style.rc(chart.key)):
        wide, narrow = _canvas(chart, WIDE), _canvas(chart, NARROW)
        return Drawing(_svg(wide), _svg(narrow), _png(wide))


def save(chart: Chart, drawing: Drawing, folder: Path) -> None:
    """Writes NAME.svg, NAME-dark.svg and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{chart.key}.svg").write_text(drawing.wide, encoding="utf-8")
    (folder / f"{chart.key}-dark.svg").write_text(style.recolour(drawing.wide, style.DARK), encoding="utf-8")
    (folder / f"{chart.key}.png").write_bytes(drawing.png)


def _svg(canvas: Canvas) -> str:
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", bbox_inches="tight", pad_inches=0.08, metadata={"Date": None})
    return style.finish(buffer.getvalue())


def _png(canvas: Canvas) -> bytes:
    buffer = io.BytesIO()
    canvas.savefig(
        buffer,
        format="png",
        dpi=160,
        bbox_inches="tight",
        pad_inches=0.08,
        facecolor=style.LIGHT["paper"],
        metadata={"Software": None},
    )
    return buffer.getvalue()


def _canvas(chart: Chart, width: float) -> Canvas:
    if isinstance(chart, Bars):
        return _bars(chart, width)
    if isinstance(chart, Lines):
        return _lines(chart, width)
    return _timeline(chart, width)


def _grid(count: int, width: float, columns: int, heights: list[float]) -> tuple[Canvas, list[Axes]]:
    """A canvas of panels, row by row; a row is as high as its highest panel needs (inches)."""
    columns = min(columns, count) if width == WIDE else 1
    rows = [max(heights[i : i + columns]) for i in range(0, count, columns)]
    canvas = Canvas(figsize=(width, sum(rows)), layout="constrained")
    axes = canvas.subplots(len(rows), columns, squeeze=False, height_ratios=rows)
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.remove()
    return canvas, flat[:count]


# Bars


def _bars(chart: Bars, width: float) -> Canvas:
    heights = [_bar_height(chart, panel) for panel in chart.panels]
    canvas, axes = _grid(len(chart.panels), width, 2, heights)
    for number, (ax, panel) in enumerate(zip(axes, chart.panels, strict=True)):
        if chart.horizontal:
            _horizontal_panel(ax, panel, chart.kind, number)
        else:
            columns = 2 if width == WIDE and len(chart.panels) > 1 else 1
            _vertical_panel(ax, panel, chart.kind, number, width / columns - 0.9)
        ax.set_title(panel.title)
    value_axis = "xlabel" if chart.horizontal else "ylabel"
    for ax in axes:
        ax.set(**{value_axis: chart.value_label})
        if not chart.horizontal:
            ax.set_xlabel(chart.group_label)
    _legend(canvas, _bar_legend(chart))
    return canvas


def _bar_height(chart: Bars, panel: BarPanel) -> float:
    if not chart.horizontal:
        return 3.1
    bars = sum(len(_present(panel, group)) for group in range(len(panel.groups)))
    return bars * 0.19 + len(panel.groups) * 0.14 + 0.95


def _present(panel: BarPanel, group: int) -> list[int]:
    """Which series have a bar, or miss one, in a group."""
    return [index for index, series in enumerate(panel.series) if not is_no_bar(series.values[group])]


def _bar_look(series: BarSeries) -> dict[str, object]:
    if series.role == "base":
        return {
            "facecolor": style.LIGHT["base"],
            "edgecolor": style.LIGHT["base-line"],
            "hatch": "////",
            "hatchcolor": style.LIGHT["paper"],
        }
    colour = style.LIGHT[style.SERIES[series.role % len(style.SERIES)]]
    hatch = style.HATCHES[series.role % len(style.HATCHES)]
    return {"facecolor": colour, "edgecolor": colour, "hatch": hatch, "hatchcolor": style.LIGHT["paper"]}


def _bar_legend(chart: Bars) -> list[Patch]:
    seen: dict[str, BarSeries] = {}
    for panel in chart.panels:
        for series in panel.series:
            seen.setdefault(series.name, series)
    return [Patch(label=name, linewidth=0.8, **_bar_look(series)) for name, series in seen.items()]


def _legend(canvas: Canvas, handles: list) -> None:
    if len(handles) > 1:
        columns = 4 if canvas.get_figwidth() == WIDE else 2
        canvas.legend(
            handles=handles,
            loc="outside upper left",
            ncols=columns,
            handlelength=2.2,
            columnspacing=1.6,
            labelcolor=INK,
        )


def _vertical_panel(ax: Axes, panel: BarPanel, kind: str, number: int, width: float) -> None:
    """Values stand upright where they are wider than their bar (`width`: of the panel, inches)."""
    count = len(panel.series)
    thick = 0.8 / count
    values = [value for series in panel.series for value in series.values if value is not None]
    longest = max((len(show(value, kind)) for value in values), default=0)
    crowded = longest * 0.066 > width / len(panel.groups) * thick
    top = max(values, default=1.0)
    for index, series in enumerate(panel.series):
        for group, value in enumerate(series.values):
            at = group + (index - (count - 1) / 2) * thick
            name = f"{number}-{index}-{group}"
            if value is None:
                ax.text(
                    at, top * 0.02, series.missing, rotation=90, ha="center", va="bottom", fontsize=7, color=MUTED,
                    style="italic", gid=f"missing-{name}",
                )  # fmt: skip
                continue
            ax.bar(at, value, thick * 0.92, linewidth=0.8, gid=f"point-{name}", **_bar_look(series))
            ax.annotate(
                show(value, kind), (at, value), (0, 2), textcoords="offset points", ha="center", va="bottom",
                fontsize=7 if crowded else 8, rotation=90 if crowded else 0, color=INK,
            )  # fmt: skip
    for group, ratio in enumerate(panel.ratios):
        heights = [series.values[group] or 0 for series in panel.series]
        ax.annotate(
            ratio, (group, max(heights)), (0, 36 if crowded else 14), textcoords="offset points", ha="center",
            fontsize=8 if crowded else 8.5, weight="bold", color=INK,
        )  # fmt: skip
    ax.set_ylim(0, top * (1.42 if crowded else 1.22))
    ax.set_xlim(-0.6, len(panel.groups) - 0.4)
    ax.set_xticks(range(len(panel.groups)), panel.groups)
    ax.tick_params(axis="x", length=0)
    ax.yaxis.set_major_formatter(_axis_number(kind))
    ax.yaxis.set_major_locator(ticker.MaxNLocator(5) if values else ticker.NullLocator())
    ax.grid(axis="y")
    ax.spines["left"].set_visible(False)


def _horizontal_panel(ax: Axes, panel: BarPanel, kind: str, number: int) -> None:
    """A bar is 1 high; a group is as high as the bars it has, and 0.7 stands between groups."""
    top = max((value for series in panel.series for value in series.values if value), default=1.0)
    centres, at = [], 0.0
    for group, ratio in enumerate([*panel.ratios, *[""] * len(panel.groups)][: len(panel.groups)]):
        present = _present(panel, group)
        centres.append(at + (len(present) - 1) / 2)
        for index in present:
            _horizontal_bar(ax, panel.series[index], group, at, top, kind, f"{number}-{index}-{group}")
            at += 1
        at += 0.7
        ax.text(
            1.0, centres[-1], ratio, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=8.5,
            weight="bold", color=INK,
        )  # fmt: skip
    ax.set_xlim(0, top * (1.42 if any(panel.ratios) else 1.18))
    ax.set_yticks(centres, panel.groups)
    ax.set_ylim(at - 0.7 - 0.2, -0.8)
    ax.xaxis.set_major_formatter(_axis_number(kind))
    ax.xaxis.set_major_locator(ticker.MaxNLocator(4))
    ax.grid(axis="x")
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="x", length=0)


def _horizontal_bar(ax: Axes, series: BarSeries, group: int, at: float, top: float, kind: str, name: str) -> None:
    value = series.values[group]
    if value is None:
        ax.text(
            top * 0.01, at, series.missing, va="center", fontsize=7, color=MUTED, style="italic", gid=f"missing-{name}"
        )
        return
    ax.barh(at, value, 0.9, linewidth=0.8, gid=f"point-{name}", **_bar_look(series))
    ax.annotate(
        show(value, kind), (value, at), (3, 0), textcoords="offset points", va="center", fontsize=7.5, color=INK
    )


def _axis_number(kind: str) -> ticker.FuncFormatter:
    if kind == "percent":
        return ticker.FuncFormatter(lambda value, _: f"{round(100 * value, 6):g} %")
    if kind == "ratio":
        return ticker.FuncFormatter(lambda value, _: f"{value:g}×")
    return ticker.FuncFormatter(lambda value, _: f"{value:,.6g}")


# Lines


def _lines(chart: Lines, width: float) -> Canvas:
    canvas, axes = _grid(len(chart.panels), width, 2, [3.5] * len(chart.panels))
    looks = _line_looks(chart)
    for number, (ax, panel) in enumerate(zip(axes, chart.panels, strict=True)):
        _line_panel(ax, chart, panel, looks, number)
    _legend(canvas, [Line2D([], [], label=name, **look) for name, look in looks.items()])
    return canvas


def _line_looks(chart: Lines) -> dict[str, dict[str, object]]:
    """One look per name, the same in all panels."""
    looks: dict[str, dict[str, object]] = {}
    published = 0
    for line in (line for panel in chart.panels for line in panel.lines):
        if line.name in looks:
            continue
        if line.published:
            colour, hollow, index = style.LIGHT["base-line"], True, published
            published += 1
        elif line.role == "base":
            colour, hollow, index = style.LIGHT["base-line"], False, -1
        else:
            colour, hollow, index = style.LIGHT[style.SERIES[line.role % len(style.SERIES)]], False, line.role
        looks[line.name] = {
            "color": colour,
            "marker": style.MARKERS[index % len(style.MARKERS)],
            "linestyle": style.DASHES[(index + hollow) % len(style.DASHES)] if index >= 0 else "-",
            "markerfacecolor": "none" if hollow else colour,
            "linewidth": 1.3 if hollow else 1.9,
        }
    return looks


def _line_panel(ax: Axes, chart: Lines, panel: LinePanel, looks: dict[str, dict[str, object]], number: int) -> None:
    if chart.x_log:
        ax.set_xscale("log", base=2)
    if chart.y_log:
        ax.set_yscale("log")
    for index, line in enumerate(panel.lines):
        _plot_line(ax, line, looks[line.name], index, f"{number}-{index}")
    xs = sorted({x for line in panel.lines for x in line.x if x is not None})
    if chart.x_log and len(xs) <= 10:
        ax.set_xticks(xs, [f"{x:,.0f}" for x in xs])
        ax.xaxis.set_minor_locator(ticker.NullLocator())
    else:
        ax.xaxis.set_major_formatter(_axis_number("number"))
    if chart.y_log:
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(_axis_number("number"))
    if xs:
        ax.set_xlim(*_padded(xs[0], xs[-1], chart.x_log))
    if not chart.y_log:
        ax.set_ylim(top=ax.get_ylim()[1] * 1.1)
    ax.grid(axis="both")
    ax.set_title(panel.title)
    ax.set(xlabel=chart.x_label, ylabel=chart.y_label)


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    """Limits with a margin; they reach points that have an x but no y too."""
    if log:
        factor = max((high / low) ** 0.09, 1.2)
        return low / factor, high * factor
    margin = (high - low) * 0.09 or abs(high) * 0.2 or 1.0
    return low - margin, high + margin


def _plot_line(ax: Axes, line: Line, look: dict[str, object], place: int, name: str) -> None:
    """`place`: the line's among those of its panel; it keeps the words for their gaps apart."""
    known = [(x, y) for x, y in zip(line.x, line.y, strict=True) if x is not None and y is not None]
    ax.plot([x for x, _ in known], [y for _, y in known], **{**look, "marker": ""}, gid=f"line-{name}")
    marker_look = {**look, "linestyle": "none"}
    for index, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if x is not None and y is not None:
            ax.plot([x], [y], **marker_look, gid=f"point-{name}-{index}")
            label = line.labels[index] if line.labels else ""
            if label:
                ax.annotate(label, (x, y), (5, 5), textcoords="offset points", fontsize=7.5, color=INK)
        elif x is not None:
            gap = f"{line.name}: not {'published' if line.published else 'measured'}"
            ax.annotate(
                gap, (x, 0.02), (9 * place - 4, 0), xycoords=ax.get_xaxis_transform(), textcoords="offset points",
                rotation=90, va="bottom", fontsize=7, style="italic", color=look["color"],
                gid=f"missing-{name}-{index}",
            )  # fmt: skip
        else:
            gap = f"not measured: {line.name} {line.labels[index] if line.labels else ''}".strip()
            row = sum(other.get_transform() == ax.transAxes for other in ax.texts)
            ax.text(
                0.02, 0.03 + 0.05 * row, gap, transform=ax.transAxes, fontsize=7, style="italic", color=look["color"],
                gid=f"missing-{name}-{index}",
            )  # fmt: skip


# The time line


def _timeline(chart: Timeline, width: float) -> Canvas:
    stages = [1 + max((span.stage for span in panel.spans), default=0) for panel in chart.panels]
    canvas, axes = _grid(len(chart.panels), width, 1, [0.42 * count + 0.75 for count in stages])
    end = max((span.end_s for panel in chart.panels for span in panel.spans), default=1.0)
    for number, (ax, panel, count) in enumerate(zip(axes, chart.panels, stages, strict=True)):
        _timeline_panel(ax, panel, count, end, width, number)
    axes[-1].set_xlabel("seconds since the release")
    requests = sorted({span.request for panel in chart.panels for span in panel.spans})
    handles = [
        Patch(label=f"request {_letter(request)}", **_span_look(request, "prefill"))
        for request in requests[: len(style.SERIES)]
    ]
    if any(span.kind == "decode" for panel in chart.panels for span in panel.spans):
        handles.append(Patch(label="decode step", **_span_look(0, "decode")))
    _legend(canvas, handles)
    return canvas


def _span_look(request: int, kind: str) -> dict[str, object]:
    if kind == "decode":
        return {"facecolor": style.LIGHT["base"], "edgecolor": style.LIGHT["paper"]}
    return {"facecolor": style.LIGHT[style.SERIES[request % len(style.SERIES)]], "edgecolor": style.LIGHT["paper"]}


def _letter(request: int) -> str:
    """A, B, ... Z, AA, AB: short enough to stand in a piece."""
    return (_letter(request // 26 - 1) if request >= 26 else "") + chr(ord("A") + request % 26)


def _timeline_panel(ax: Axes, panel: TimelinePanel, stages: int, end: float, width: float, number: int) -> None:
    for index, span in enumerate(panel.spans):
        length = span.end_s - span.start_s
        ax.barh(
            span.stage, length, 0.78, left=span.start_s, linewidth=0.7, gid=f"point-{number}-{index}",
            **_span_look(span.request, span.kind),
        )  # fmt: skip
        label = "" if span.piece is None else f"{_letter(span.request)}{span.piece + 1}"
        if label and span.kind != "decode" and length / end * width > 0.1 + 0.08 * len(label):
            ax.text(
                span.start_s + length / 2, span.stage, label, ha="center", va="center", fontsize=7,
                color=style.LIGHT["paper"], weight="bold",
            )  # fmt: skip
    finish = max((span.end_s for span in panel.spans), default=0.0)
    ax.axvline(finish, color=INK, linewidth=0.9, linestyle=(0, (3, 2)))
    ax.annotate(
        f"{significant(finish)} s", (finish, -0.5), (-3, 2), textcoords="offset points", fontsize=8, weight="bold",
        ha="right", color=INK, annotation_clip=False,
    )  # fmt: skip
    ax.set_yticks(range(stages), [f"stage {stage + 1}" for stage in range(stages)])
    ax.set_ylim(stages - 0.5, -0.5)
    ax.set_xlim(0, end * 1.01)
    ax.xaxis.set_major_formatter(_axis_number("number"))
    ax.grid(axis="x")
    ax.spines["left"].set_visible(False)
    ax.set_title(panel.title)
