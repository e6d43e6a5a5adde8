"""The report as one HTML file that needs nothing else: styles, script and charts are inside."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from arkbench.report import style
from arkbench.report.blocks import (
    Block,
    Bullets,
    Column,
    Counts,
    Definitions,
    Details,
    Paragraph,
    Report,
    Section,
    Table,
)  # fmt: skip
from arkbench.report.charts import Bars, Chart, Lines, Timeline
from arkbench.report.draw import Drawing
from arkbench.report.figures import MISSING, Figure, asides, show, text
from arkbench.report.markdown import VERDICT_SIGNS

ASSETS = Path(__file__).parent / "assets"

MANY_COLUMNS = 9
"""More columns than these are printed smaller, or they would run over the paper's edge."""


def render(report: Report, drawings: Mapping[str, Drawing]) -> str:
    """The page; `drawings` holds every chart of the report by its key."""
    css = (ASSETS / "report.css").read_text(encoding="utf-8")
    script = (ASSETS / "report.js").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{s.key}">{escape(s.title)}</a>' for s in report.sections)
    facts = "".join(f"<div><dt>{escape(n)}</dt><dd>{escape(v)}</dd></div>" for n, v in report.facts)
    warning = f'<p class="warning" role="note">{escape(report.warning)}</p>' if report.warning else ""
    sections = "\n".join(_section(section, drawings) for section in report.sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(report.title)}</title>
<link rel="icon" href="data:,">
<style>
{_theme_css()}
{css}</style>
</head>
<body>
<a class="skip" href="#verdicts">Skip to the verdicts</a>
<header>
<div class="bar"><span class="brand">arkbench</span><button id="theme" type="button">Dark theme</button></div>
<h1>{escape(report.title)}</h1>
<p class="lead">{escape(report.lead)}</p>
{warning}
<dl class="facts">{facts}</dl>
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{sections}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _theme_css() -> str:
    light = "".join(f"--{name}:{colour};" for name, colour in style.LIGHT.items())
    dark = "".join(f"--{name}:{colour};" for name, colour in style.DARK.items())
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f"@media screen{{:root[data-theme=dark]{{color-scheme:dark;{dark}}}}}"
    )


def _section(section: Section, drawings: Mapping[str, Drawing]) -> str:
    blocks = "\n".join(_block(block, drawings) for block in section.blocks)
    return (
        f'<section id="{escape(section.key)}" aria-labelledby="{escape(section.key)}-title">\n'
        f'<h2 id="{escape(section.key)}-title">{escape(section.title)}</h2>\n{blocks}\n</section>'
    )


def _block(block: Block, drawings: Mapping[str, Drawing]) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Bars | Lines | Timeline):
        return _chart(block, drawings[block.key])
    if isinstance(block, Paragraph):
        if block.text.startswith("```"):
            return f"<pre>{escape(block.text.strip('`').strip())}</pre>"
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Definitions):
        items = "".join(f"<div><dt>{escape(t)}</dt><dd>{escape(m)}</dd></div>" for t, m in block.items)
        return f'<dl class="definitions">{items}</dl>'
    if isinstance(block, Counts):
        return _counts(block)
    if isinstance(block, Details):
        inner = "\n".join(_block(part, drawings) for part in block.blocks)
        return f"<details><summary>{escape(block.summary)}</summary>\n{inner}\n</details>"
    raise TypeError(f"no HTML for {type(block).__name__}")


def _slug(verdict: str) -> str:
    return verdict.replace(" ", "-")


def _counts(block: Counts) -> str:
    tiles = "".join(
        f'<li class="{escape(_slug(name))}{"" if count else " none"}"><b>{count}</b>'
        f'<span><i aria-hidden="true">{VERDICT_SIGNS.get(name, "")}</i> {escape(name)}</span></li>'
        for name, count in block.items
    )
    return f'<ul class="counts" aria-label="Verdicts">{tiles}</ul>'


def _chart(chart: Chart, drawing: Drawing) -> str:
    wide = style.inline(drawing.wide, f"{chart.key}-w", chart.alt)
    narrow = style.inline(drawing.narrow, f"{chart.key}-n", chart.alt)
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>'
        f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>'
    )


def _table(block: Table) -> str:
    body = "".join(
        "<tr>"
        + "".join(_cell(c, v, i == 0) for i, (c, v) in enumerate(zip(block.columns, row, strict=True)))
        + "</tr>\n"
        for row in block.rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(block.caption)}">'
        f'<table class="sortable{" many" if len(block.columns) > MANY_COLUMNS else ""}" id="table-{escape(block.key)}">'
        f"<caption><span>{escape(block.caption)}</span></caption>"
        f"<thead>{_head(block)}</thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _head(block: Table) -> str:
    """One row of headings, with a row of groups above it where columns share one."""
    rows = ""
    if any(column.group for column in block.columns):
        spans = [(group, len(list(columns))) for group, columns in groupby(block.columns, lambda column: column.group)]
        cells = "".join(
            f'<th scope="colgroup" colspan="{n}" class="group">{escape(g)}</th>' if g else f'<td colspan="{n}"></td>'
            for g, n in spans
        )
        rows += f'<tr class="groups">{cells}</tr>'
    names = "".join(
        f'<th scope="col" class="{_align(column)}" aria-sort="none"><button type="button">{escape(column.name)}'
        + (f" <small>{escape(column.unit)}</small>" if column.unit else "")
        + "</button></th>"
        for column in block.columns
    )
    return rows + f"<tr>{names}</tr>"


def _align(column: Column) -> str:
    return "words" if column.kind in ("text", "verdict") else "figure"


def _cell(column: Column, value: Any, first: bool) -> str:
    tag = 'th scope="row"' if first else "td"
    end = "th" if first else "td"
    raw = value.value if isinstance(value, Figure) else value
    sort = f' data-value="{raw}"' if isinstance(raw, int | float) else ""
    absent = " empty" if raw is None or raw == "" else ""
    return f'<{tag} class="{_align(column)}{absent}"{sort}>{_content(column, value)}</{end}>'


def _content(column: Column, value: Any) -> str:
    if isinstance(value, Figure):
        small = asides(value)
        mark = ""
        if value.mark:
            mark = (
                f' <abbr class="mark" title="{escape(value.mark)}" aria-label="marked: {escape(value.mark)}">!</abbr>'
            )
        return escape(show(value.value, column.kind)) + mark + (f"<small>{escape(small)}</small>" if small else "")
    if column.kind == "verdict":
        sign = f'<i aria-hidden="true">{VERDICT_SIGNS.get(value, "")}</i>'
        return f'<span class="verdict {escape(_slug(value))}">{sign} {escape(value)}</span>'
    if _align(column) == "words":
        return escape(text(value)) or f'<span class="absent">{MISSING}</span>'
    return escape(show(value, column.kind))
