from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from arkbench.report import build, charts, data, draw, style
from arkbench.report.charts import NO_BAR, BarPanel, Bars, BarSeries, Line, LinePanel, Lines
from tests.report import factory

MAKERS = {
    "fused": factory.fused_kernels,
    "gaps": factory.with_gaps,
    "loops": factory.inverted_loops,
    "batching": factory.decode_batching,
    "pipelined": factory.pipelined_prefill,
    "models": factory.models,
    "kernels": factory.kernels,
}


def marks(svg: str, word: str) -> int:
    return len(re.findall(rf'id="{word}-', svg))


def relative_luminance(colour: str) -> float:
    """WCAG 2's relative luminance of #rrggbb."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((relative_luminance(one), relative_luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", MAKERS)
def test_every_point_is_on_its_chart_and_every_gap_is_named(name: str, tmp_path: Path) -> None:
    found = build.build(data.load([MAKERS[name](tmp_path / name)])).charts()
    assert len({chart.key for chart in found}) == len(found)
    for chart in found:
        with draw.matplotlib.rc_context(style.rc(chart.key)):
            canvas = draw._canvas(chart, draw.WIDE)
        ids = [artist.get_gid() for artist in canvas.findobj(lambda artist: bool(artist.get_gid()))]
        assert len(set(ids)) == len(ids), chart.key
        assert sum(name.startswith("missing-") for name in ids) == chart.missing(), chart.key
        assert sum(name.startswith("point-") for name in ids) == chart.points() - chart.missing(), chart.key


def test_points_are_the_rows(tmp_path: Path) -> None:
    found = {c.key: c for c in build.build(data.load([factory.with_gaps(tmp_path / "a")])).charts()}
    decode = found["fused-kernels-decode"]
    # Three rows of the note, two variants, published and measured; measured lacks standard 16 and fused 8.
    assert decode.points() == 12 and decode.missing() == 2
    streams = found["fused-kernels-streams"]
    assert streams.points() == 6 and streams.missing() == 2


def test_a_null_group_is_shown_and_a_bar_that_was_not_planned_is_not() -> None:
    series = [BarSeries("a", [1.0, None]), BarSeries("b", [NO_BAR, None], 1)]
    chart = Bars("k", "t", "alt", [BarPanel("p", ["x", "null"], series)], "v", horizontal=True)
    assert (chart.points(), chart.missing()) == (3, 2)
    svg = draw.draw(chart).wide
    assert (marks(svg, "point"), marks(svg, "missing")) == (1, 2)
    assert svg.count("not measured") == 2


def test_a_line_without_x_or_y_says_so() -> None:
    line = Line("a", [1.0, None, 4.0], [None, 5.0, 6.0], ["1", "2", "4"])
    chart = Lines("k", "t", "alt", [LinePanel("p", [line])], "x", "y")
    svg = draw.draw(chart).wide
    assert (chart.points(), chart.missing()) == (3, 2)
    assert (marks(svg, "point"), marks(svg, "missing")) == (1, 2)


def test_every_file_is_well_formed(rendered: dict[str, Path]) -> None:
    drawings = list(rendered["pipelined"].glob("charts/*.svg"))
    assert drawings
    for path in drawings:
        ElementTree.parse(path)


def test_nothing_but_gaps_still_draws() -> None:
    bars = Bars("k", "t", "alt", [BarPanel("p", ["x"], [BarSeries("a", [None])])], "v")
    lines = Lines("l", "t", "alt", [LinePanel("p", [Line("a", [1.0], [None])])], "x", "y", x_log=True, y_log=True)
    for chart in (bars, lines):
        assert marks(draw.draw(chart).wide, "missing") == 1


def test_drawings_are_stable() -> None:
    chart = Bars("k", "t", "alt", [BarPanel("p", ["x"], [BarSeries("a", [2.0], "base"), BarSeries("b", [3.0])])], "v")
    one, two = draw.draw(chart), draw.draw(chart)
    assert one == two
    assert "<metadata" not in one.wide and "<!DOCTYPE" not in one.wide


def test_the_bars_stand_at_their_values() -> None:
    chart = Bars("k", "t", "alt", [BarPanel("p", ["x", "y"], [BarSeries("a", [2.0, 6.0])], ["", "3.00×"])], "v")
    with draw.matplotlib.rc_context(style.rc("k")):
        axes = draw._canvas(chart, draw.WIDE).axes[0]
    assert [patch.get_height() for patch in axes.patches] == [2.0, 6.0]
    assert {"2", "6", "3.00×"} <= {text.get_text() for text in axes.texts}


def test_a_panel_without_a_figure_has_no_scale() -> None:
    panels = [BarPanel(name, ["x"], [BarSeries("a", [value])]) for name, value in (("p", 2.0), ("m", None))]
    with draw.matplotlib.rc_context(style.rc("k")):
        full, empty = draw._canvas(Bars("k", "t", "alt", panels, "v"), draw.WIDE).axes
    assert len(full.get_yticks()) > 1
    assert list(empty.get_yticks()) == []


def test_small_fractions_have_ticks_that_differ() -> None:
    panel = BarPanel("p", ["x", "y"], [BarSeries("a", [0.006, 0.002])])
    chart = Bars("k", "t", "alt", [panel], "v", horizontal=True, kind="percent")
    with draw.matplotlib.rc_context(style.rc("k")):
        axes = draw._canvas(chart, draw.WIDE).axes[0]
        ticks = [axes.xaxis.get_major_formatter()(value) for value in axes.get_xticks()]
    assert ticks[0] == "0 %" and "0.2 %" in ticks
    assert len(set(ticks)) == len(ticks)


@pytest.mark.parametrize("palette", [style.LIGHT, style.DARK])
def test_contrast(palette: dict[str, str]) -> None:
    """WCAG AA: 4.5 for text, 3 for graphics."""
    for name in ("ink", "muted"):
        assert contrast(palette[name], palette["paper"]) >= 4.5, name
    for name in ("base-line", *style.SERIES):
        assert contrast(palette[name], palette["paper"]) >= 3, name


def test_the_palettes_name_the_same_colours_each_once() -> None:
    assert style.LIGHT.keys() == style.DARK.keys()
    assert len(set(style.LIGHT.values())) == len(style.LIGHT)
    assert len(style.SERIES) == len(style.MARKERS) == len(style.DASHES) == len(style.HATCHES)


def test_dark_drawings_hold_no_light_colour(rendered: dict[str, Path]) -> None:
    drawings = list(rendered["fused"].glob("charts/*-dark.svg"))
    assert drawings
    for path in drawings:
        text = path.read_text(encoding="utf-8")
        assert not [colour for colour in style.LIGHT.values() if colour in text], path.name
        assert style.DARK["ink"] in text


def test_the_baseline_is_grey_wherever_it_stands() -> None:
    assert style.roles(["fused", "standard"]) == {"standard": "base", "fused": 0}
    assert style.roles(["ark-2.0", "ark-2.1"]) == {"ark-2.0": "base", "ark-2.1": 0}
    assert style.roles(["ark-1.0", "ark-2.0"]) == {"ark-1.0": "base", "ark-2.0": 0}
    assert style.roles(["best"]) == {"best": 0}


def test_every_chart_is_saved_three_times_and_has_an_alt_text(rendered: dict[str, Path]) -> None:
    for name, folder in rendered.items():
        for chart in build.build(data.load([folder])).charts():
            assert len(chart.alt) > 40, (name, chart.key)
            for ending in (".svg", "-dark.svg", ".png"):
                assert (folder / "charts" / f"{chart.key}{ending}").stat().st_size > 500


def test_the_timeline_starts_at_its_own_zero(tmp_path: Path) -> None:
    found = build.build(data.load([factory.pipelined_prefill(tmp_path / "a")])).charts()
    timeline = next(chart for chart in found if isinstance(chart, charts.Timeline))
    assert [panel.title for panel in timeline.panels] == ["ark-2.0", "ark-2.1"]
    assert all(min(span.start_s for span in panel.spans) == 0 for panel in timeline.panels)
    assert timeline.points() == 2 * (2 * 4 * 4 + 4)
